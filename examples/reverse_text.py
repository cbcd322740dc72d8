"""A taskset of verifiers: reverse a text. Installed nowhere: `agent_kwargs: {taskset: examples/reverse_text.py}`.

The reward is the share of the wanted text that the answer has in the right order.
"""

import random
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf

WORDS = ["sun", "moon", "star", "tree", "leaf", "root", "wind", "rain", "snow", "fire", "sand", "wave", "rock"]


class ReverseData(vf.TaskData):
    text: str


class ReverseTask(vf.Task[ReverseData]):
    def said(self, trace: vf.Trace) -> str:
        return str(trace.last_reply or "").strip()

    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        return SequenceMatcher(None, self.said(trace), self.data.text[::-1], autojunk=False).ratio()

    @vf.metric
    async def is_exact(self, trace: vf.Trace) -> float:
        return float(self.said(trace) == self.data.text[::-1])


class ReverseTextConfig(vf.TasksetConfig):
    num_tasks: int = 200
    num_words: int = 3


class ReverseText(vf.Taskset[ReverseTask, ReverseTextConfig]):
    def load(self) -> Iterator[ReverseTask]:
        for number in range(self.config.num_tasks):
            text = " ".join(random.Random(number).choices(WORDS, k=self.config.num_words))
            data = ReverseData(prompt=text, system_prompt="Reverse the text.", text=text)
            yield ReverseTask(data, self.config.task)


__all__ = ["ReverseText"]
