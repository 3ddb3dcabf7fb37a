"""A proof as JSON, and back. The key names are fixed, for tools read them.

What could not be measured is null, never a zero or a NaN.
"""

import math
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import BadInputError
from paceline.prove.results import Proof

Json = dict[str, Any]


def as_document(proof: Proof) -> Json:
    """The top level of the JSON in its order; infinities and NaN become null."""
    document: Json = msgspec.json.decode(msgspec.json.encode(proof))  # a trip through JSON leaves only what JSON has
    document["criteria"] = [_renamed(entry, "passed", "pass") for entry in document["criteria"]]
    return document


def write_document(proof: Proof, path: Path) -> None:
    """Raises OSError if the file cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(as_document(proof)), indent=2)
    path.write_bytes(text + b"\n")


def read_document(path: Path) -> Proof:
    """The proof that `write_document` wrote. Raises BadInputError for another file."""
    try:
        document: Json = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        document["criteria"] = [_renamed(entry, "pass", "passed") for entry in document["criteria"]]
        document["speedup"] = [
            entry | {"ci95": [math.nan if end is None else end for end in entry["ci95"]]} for entry in document["speedup"]
        ]
        return msgspec.convert(document, Proof)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # a msgspec.ValidationError is a ValueError
        raise BadInputError(f"{path} is not a proof as `paceline prove --json` writes it: {' '.join(str(error).split())}") from None


def _renamed(entry: Json, old: str, new: str) -> Json:
    return {new if key == old else key: value for key, value in entry.items()}
