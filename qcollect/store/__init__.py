"""One capture <-> one file, the manifest that lists them, and the JSON files of a run."""
