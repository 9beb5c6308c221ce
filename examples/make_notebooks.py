"""Make the notebooks from the scripts examples/notebooks/*.py, and run them. Needs jupytext, nbclient and ipykernel.

make notebooks
"""

import os
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"


def main():
    for script in sorted(FOLDER.glob("*.py")):
        notebook = jupytext.read(script)
        NotebookClient(notebook, resources={"metadata": {"path": str(FOLDER)}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # dates and times
        file = script.with_suffix(".ipynb")
        temporary = file.with_name(f"{file.name}.tmp")
        nbformat.write(notebook, temporary)
        os.replace(temporary, file)
        print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
