"""Port modules of a library when they are imported: some name `torch.cuda` in their own text."""

import importlib.machinery
import sys

from tests.programs import porting


class _Loader(importlib.machinery.SourceFileLoader):
    rules = ()

    def get_data(self, path):
        data = super().get_data(path)
        if path.endswith(".py"):
            return porting.port(data.decode(), self.rules).encode()
        raise OSError("no bytecode: it would be that of the text before")


def install(rules, modules):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name not in modules:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader = _Loader(name, spec.origin)
            spec.loader.rules = getattr(porting, rules)
            return spec

    sys.meta_path.insert(0, Finder)
