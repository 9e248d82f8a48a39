"""Which launches the calls of a test take."""


def chosen(monkeypatch, *places):
    """A set that fills as calls are made: (module, block_m, block_n, whether k is cut) of each Config that is picked.

    Args:
        monkeypatch: pytest's.
        places: (module, name) of the functions that pick.
    """
    seen = set()

    def watch(module, name):
        pick = getattr(module, name)

        def keep(*args, **options):
            config = pick(*args, **options)
            seen.add((module.__name__.split(".")[-1], config.block_m, config.block_n, config.splits > 1))
            return config

        monkeypatch.setattr(module, name, keep)

    for place in places:
        watch(*place)
    return seen
