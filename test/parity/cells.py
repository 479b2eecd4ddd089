"""The matrix: which cells there are, and the plan by which the Python and the C++ ranks run them.

A mode is a set of settings. Both sides know the settings (python_ranks.py, cells.cpp) and refuse an
unknown one; a new mode made of known settings is one line here.

    find_unused_parameters, gradient_as_bucket_view, bucket_cap_mb   DDP's options
    spare        the model's layer `spare` exists, and is used: never, or by some ranks in some steps
    accumulate   micro-batches a step; all but the last under no_sync()
    set_to_none  0: zero_grad() fills the gradients with zeros
    weight_decay the optimizer's; it tells a gradient of zeros from none, which leaves a parameter alone
"""

from typing import NamedTuple

MODES = {
    "default": {},
    "find_unused": {"find_unused_parameters": "1", "spare": "never", "weight_decay": "0.01"},
    "find_unused_some_ranks": {"find_unused_parameters": "1", "spare": "some_ranks", "bucket_cap_mb": "0.002",
                               "weight_decay": "0.01"},
    "bucket_view": {"gradient_as_bucket_view": "1"},
    "no_bucket_view": {"gradient_as_bucket_view": "0"},
    "accumulate": {"accumulate": "4"},
    "tiny_buckets": {"bucket_cap_mb": "0.002"},
    "zeroed_gradients": {"set_to_none": "0", "bucket_cap_mb": "0.002"},
    "zeroed_bucket_view": {"set_to_none": "0", "gradient_as_bucket_view": "1"},
}


class Cell(NamedTuple):
    model: str
    mode: str

    @property
    def name(self):
        return f"{self.model}.{self.mode}"

    @property
    def settings(self):
        return MODES[self.mode]

    @property
    def micro_batches(self):
        return int(self.settings.get("accumulate", "1"))


class Plan(NamedTuple):
    steps: int
    learning_rate: float
    momentum: float
    cells: list

    def write(self, path):
        """As the C++ ranks read it (cells.h)."""
        with open(path, "w", encoding="ascii") as file:
            print(f"steps={self.steps} learning_rate={self.learning_rate} momentum={self.momentum}", file=file)
            for cell in self.cells:
                settings = {"model": cell.model, **cell.settings}
                print(cell.name, *(f"{key}={value}" for key, value in settings.items()), file=file)


def spare_is_used(setting, rank, step):
    """Every fifth step no rank uses the layer; otherwise the even ranks and the odd ones in turn."""
    return setting == "some_ranks" and step % 5 != 4 and (rank + step) % 2 == 0
