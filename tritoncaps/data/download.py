"""`tritoncaps data get`: download a file, resume an incomplete download, and keep it only if its checksum is right."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from tritoncaps.data.files import DataError
from tritoncaps.data.sources import Source

CHUNK = 1 << 20

Report = Callable[[str, int, int], object]  # file name, bytes so far, bytes in all


def fetch(source: Source, folder: Path, report: Report = lambda *_: None, timeout: float = 30.0) -> Path:
    """Download ``source`` into ``folder`` if it is not there, and return its path."""
    path = folder / source.name
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (source.name + ".part")
    failures = []
    for address in source.addresses:
        try:
            _continue(address + source.name, part, source, report, timeout)
        except (OSError, HTTPException) as error:
            failures.append(f"{address}: {getattr(error, 'reason', error)}")
            continue
        if part.stat().st_size == source.size and checksum(part) == source.sha256:
            os.replace(part, path)
            return path
        part.unlink()
        failures.append(f"{address}: not the expected content")
    raise DataError(
        f"{source.name} cannot be downloaded ({'; '.join(failures)}): get it from elsewhere, {source.size} bytes with "
        f"sha256 {source.sha256}, and put it into {folder}"
    )


def _continue(address: str, part: Path, source: Source, report: Report, timeout: float) -> None:
    """Append the missing bytes to ``part``. If the server cannot resume, download the whole file."""
    have = part.stat().st_size if part.exists() else 0
    if have >= source.size:
        return
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        resumes = response.status == 206
        have = have if resumes else 0
        with open(part, "ab" if resumes else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                report(source.name, have, source.size)
    if have < source.size:
        raise OSError(f"the connection ended after {have} of {source.size} bytes; run the command again to resume")


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
