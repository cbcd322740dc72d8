"""The endless, seeded data order of a run. Its position is part of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from posttrain.data.errors import DataError
from posttrain.data.readers import Item
from posttrain.data.row_dataset import RowDataset
from posttrain.files.json_files import JsonMapping, JsonObject


class Stream(Generic[Item]):
    """Iterates over a dataset endlessly; (seed, epoch) determines the order of each epoch."""

    def __init__(self, dataset: RowDataset[Item], seed: int, shuffle: bool = True) -> None:
        if len(dataset) == 0:
            raise DataError(f"{dataset.name}: the dataset has no rows")
        self._dataset: RowDataset[Item] = dataset
        self._seed, self._shuffle = seed, shuffle
        self._position = 0
        self._order_of_epoch: tuple[int, NDArray[np.int64]] | None = None

    @property
    def position(self) -> int:
        """Items handed out so far."""
        return self._position

    @property
    def epoch(self) -> int:
        """Whole passes through the dataset so far."""
        return self._position // len(self._dataset)

    def take(self, count: int) -> list[Item]:
        """The next `count` items. `draw` of each is its position in the stream, unique in a run."""
        assert count >= 0
        items = [self.item(position) for position in range(self._position, self._position + count)]
        self._position += count
        return items

    def state_dict(self) -> JsonObject:
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: JsonMapping) -> None:
        """Continues from `state`. Rejects a state of other data, seed or shuffling, whose order would differ."""
        missing = {"position", *self._identity()} - set(state)
        if missing:
            raise DataError(f"the saved data position is incomplete: it lacks {', '.join(sorted(missing))}")
        differences = [
            "its content is another" if name == "fingerprint" else f"{name}: saved {state[name]!r}, now {value!r}"
            for name, value in self._identity().items()
            if name != "dataset" and state[name] != value
        ]
        if differences:
            raise DataError(
                f"the checkpoint's position in the data means nothing here: it was made with {state['dataset']}, "
                f"this is {self._dataset.name}; {'; '.join(differences)}. "
                "Use the data and the seed of that run, or start in a new folder (checkpointing.checkpoint_dir)"
            )
        self._position = int(state["position"])

    def _identity(self) -> JsonObject:
        return {
            "dataset": self._dataset.name,
            "length": len(self._dataset),
            "fingerprint": self._dataset.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def item(self, position: int) -> Item:
        """The item with `draw` = `position`, handed out or not."""
        epoch, place = divmod(position, len(self._dataset))
        return replace(self._dataset[int(self._order(epoch)[place])], draw=position)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._dataset))
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            self._order_of_epoch = (epoch, self._dataset.order(self._seed, epoch))
        return self._order_of_epoch[1]
