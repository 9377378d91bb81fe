"""The package that SGLang's model registry reads: each module here names its class in `EntryClass`."""
