"""The sub-commands of `dspine`, one module each; its function `run` holds the command's arguments and help."""
