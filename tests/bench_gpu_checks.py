"""What `python -m bench.gpu` does to a backend's calls, but for CUDA itself; each check names its subject."""

from bench.gpu import contract, memory, repeats
from bench.gpu.part import Room, run


def small(subject, *words, rows=None):
    """Name -> (op, inputs) of the subject's branches that have one of ``words`` in their names, of so many rows."""
    found = {}
    for name, (op, inputs) in subject.branches("cpu").items():
        if any(word in name for word in words):
            short = {key: inputs[key][:rows] for key in ("x", "residual") if key in inputs}
            found[name] = (op, {**inputs, **short})
    return found


def guards_and_repeats(subject, op, inputs, times=3):
    """Nothing beside a tensor is touched, and every call gives the same bits."""
    assert repeats.repeat(op, inputs, subject.backend, times=times) == {"repeats": times}
    assert memory.guarded_call(op, inputs, subject.backend) == {}


def contract_items(subject, folder, cases, masks, count=1):
    """The first ``count`` items with ``cases`` in their names are judged green, and the check that has ``masks``."""
    items = {item.key: item for item in contract.items(Room(folder, {}, 0.0, [subject], "cpu"), None)}
    chosen = [key for key in items if cases in key][:count]
    for key in chosen:
        record = run(items[key])
        assert record["state"] == "green" and 0 < record["C1"] <= 1, record
        assert key.startswith(f"{subject.backend} {record['op']}-"), record
    assert len(chosen) == count and run(items[next(key for key in items if masks in key)])["state"] == "green"
