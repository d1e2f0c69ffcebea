"""Runs a user's script from the copy that its run has kept: ``python runner.py KEPT SCRIPT [arguments]``.

The script cannot tell the difference: ``__file__``, ``sys.path``, ``sys.argv``, tracebacks and packages' data name the
script's own folder. Only the source text of the script, and of the modules below its folder, comes from the copies.

This file is run by path and imports only the standard library, because a script may set the environment before it
imports torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import linecache
import os
import sys
import traceback
import types
from collections.abc import Sequence


class KeptSource(importlib.machinery.SourceFileLoader):
    """Loads the module of `path` from the text in `kept`."""

    def __init__(self, fullname: str, path: str, kept: str) -> None:
        super().__init__(fullname, path)
        self._kept = kept

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the copy. Bytecode that is cached beside the original could belong to another text."""
        with open(self._kept, "rb") as file:
            source = file.read()
        path = os.fspath(self.path)
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
        linecache.cache[path] = (len(source), None, lines, path)  # tracebacks and inspect.getsource show this text
        return compile(source, path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        with open(self._kept, "rb") as file:
            return importlib.util.decode_source(file.read())


class KeptFinder:
    """Finds the modules of one of the user's folders: in the copy, or in the folder if not copied (extensions)."""

    def __init__(self, folder: str, kept: str) -> None:
        self._folder, self._kept = folder, kept
        machinery = importlib.machinery
        self._in_place = machinery.FileFinder(
            folder, (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
            (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
            (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
        )  # fmt: skip

    def find_spec(self, fullname: str, target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        name = fullname.rpartition(".")[2]
        for file in (os.path.join(name, "__init__.py"), f"{name}.py"):
            kept = os.path.join(self._kept, file)
            if os.path.isfile(kept):
                path = os.path.join(self._folder, file)
                places = [os.path.dirname(path)] if file != f"{name}.py" else None
                loader = KeptSource(fullname, path, kept)
                return importlib.util.spec_from_file_location(
                    fullname, path, loader=loader, submodule_search_locations=places
                )
        return self._in_place.find_spec(fullname, target)

    def invalidate_caches(self) -> None:
        self._in_place.invalidate_caches()


def install(home: str, kept: str) -> None:
    """Load modules below the folder `home` from their copies below `kept` from now on."""

    def finder(path: str) -> KeptFinder:
        inside = os.path.relpath(os.path.realpath(path), home)
        if inside.split(os.sep)[0] == os.pardir or not os.path.isdir(os.path.join(kept, inside)):
            raise ImportError(f"{path} has not been copied")
        return KeptFinder(path, os.path.join(kept, inside))

    sys.path_hooks.insert(0, finder)
    sys.path_importer_cache.clear()


def run(kept: str, script: str, arguments: Sequence[str]) -> None:
    path = os.path.realpath(script)
    home = os.path.dirname(path)
    sys.path[0] = home
    sys.argv = [script, *arguments]
    install(home, kept)
    loader = KeptSource("__main__", os.path.abspath(script), os.path.join(kept, os.path.basename(path)))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=loader.path, __loader__=loader, __spec__=None, __builtins__=__builtins__)
    this, sys.modules["__main__"] = sys.modules["__main__"], main
    sys.modules["_rallypoint_script"] = this  # keeps the script's objects alive
    try:
        exec(loader.get_code("__main__"), main.__dict__)
    except KeyboardInterrupt:
        sys.exit(130)  # the process that sent the signal knows why
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # skip our own frames above the script's
        error.__traceback__ = trace
        sys.last_value = error  # as the interpreter does: `rp.wrap` tells the job why the script has ended
        if sys.excepthook is sys.__excepthook__:  # it would show the lines of the file as it is now
            traceback.print_exception(error)
        else:
            sys.excepthook(type(error), error, trace)
        sys.exit(1)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
