"""Publish a drafter: weights, code, card and results in one commit, or a message that says what is missing.

    python examples/push.py model_cards/dspine-smollm2-135m-instruct someone/my-drafter --dry-run

The folder holds the drafter, results.json (of `dspine eval`) and training.json (what it was trained on and how).
`dspine push` does the same.
"""

import argparse

from dspine_hf import DSpineDraftModel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder")
parser.add_argument("repo_id", help="someone/name; the token is that of 'hf auth login', or HF_TOKEN")
parser.add_argument("--private", action="store_true", default=None)
parser.add_argument("--dry-run", action="store_true", help="check and show everything, send nothing")


def main() -> None:
    args = parser.parse_args()
    drafter = DSpineDraftModel.from_pretrained(args.folder, dtype="auto")
    drafter.push_to_hub(args.repo_id, private=args.private, dry_run=args.dry_run)


if __name__ == "__main__":
    main()
