"""The answered requests of the open step on disk, so that a resumed run repeats no rollout that had ended and answers
the others as before.

Needed for exactness, not only for time: a request that is sampled again in another batch has the same tokens, but
log-probabilities that differ in their last bits. A journal holds one step. It is used by the first step after a resume,
whose weights come from a checkpoint (`open_run` removes all others), if the config and the code of the agents are the
same; a result, if its task is. What was sampled together is written together,
before an agent gets its answer: of a batch that a kill cut off nothing is read, so it is sampled again as a whole.
Each line has its checksum. From a damaged one on nothing is read, as if the kill had come before it.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from posttrain.environments.agents.pool import AgentOutcome
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonObject
from posttrain.rollouts.call_tree import Call, CallKey, CallTree
from posttrain.types import Completion, Sampling, Score, Task, Utterance

RolloutId = tuple[int, int]  # (draw, sample)


@dataclass
class CallJournal:
    path: Path
    identity: str  # of everything that decides the answers besides the weights and the tasks
    warn: Callable[[str], None]
    _step: int | None = None
    _file: IO[bytes] | None = None
    _calls: dict[tuple[RolloutId, CallKey], Call] = field(default_factory=dict)
    _batches: list[list[tuple[RolloutId, Call]]] = field(default_factory=list)
    _ends: dict[RolloutId, JsonObject] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, step: int, sampling: Sampling) -> None:
        """Open the journal of a step. Only the first step of a process may find one."""
        if step == self._step:
            return
        header = {"identity": self.identity, "step": step}
        self._calls, self._batches, self._ends = {}, [], {}
        num_bytes = self._load(header, sampling) if self._step is None else 0
        self.close()
        self._step = step
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("r+b" if num_bytes else "wb")
        self._file.truncate(num_bytes)
        self._file.seek(num_bytes)
        if not num_bytes:
            self._write(header)

    def _load(self, header: JsonObject, sampling: Sampling) -> int:
        """Returns the length in bytes of what can be used."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        num_bytes = 0
        for number, text in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
            if text != _with_checksum(body := b"{" + text.partition(b", ")[2]):
                problem = f"{self.path}: line {number} is damaged. What follows it is not used: those requests are "
                self.warn(problem + "sampled again, and agents that had ended after it run again")
                break
            line = json.loads(body)
            if number == 1 and line != header:
                return 0
            if "end" in line:
                self._ends[tuple(line["rollout"])] = line
            elif number > 1:
                self._batches.append([self._read(call, sampling) for call in line["batch"]])
            num_bytes += len(text) + 1
        return num_bytes

    def _read(self, line: JsonObject, sampling: Sampling) -> tuple[RolloutId, Call]:
        rollout: RolloutId = tuple(line["rollout"])
        context, (role, text) = tuple(line["context"]), line["said"]
        call = Call(
            None if line["parent"] is None else self._calls[rollout, tuple(line["parent"])],
            context,
            Utterance(role, text, len(context)),
            tuple(line["key"]),
            replace(sampling, max_new_tokens=line["max_new_tokens"], stop_strings=tuple(line["stop"])),
            Completion(tuple(line["tokens"]), tuple(line["logprobs"]), line["text"], line["finish"]),
        )
        self._calls[rollout, call.key] = call
        return rollout, call

    def answer(self, rollout: RolloutId, key: CallKey) -> Completion | None:
        """What this request was answered before."""
        return call.answer if (call := self._calls.get((rollout, key))) is not None else None

    def batches(self, rollouts: Mapping[RolloutId, object]) -> Iterator[list[tuple[RolloutId, Call]]]:
        """What was sampled together for these rollouts before."""
        return (batch for batch in self._batches if all(rollout in rollouts for rollout, _ in batch))

    def add(self, calls: Sequence[tuple[RolloutId, Call]]) -> None:
        """What was sampled together."""
        if new := [_line(rollout, call) for rollout, call in calls if (rollout, call.key) not in self._calls]:
            self._write({"batch": new})

    def end(self, rollout: RolloutId, task: Task, tree: CallTree, counts: Mapping[str, float], score: Score) -> None:
        """The rollout is over, with this result."""
        answer = score.answer if isinstance(score, AgentOutcome) else None
        result = {"reward": score.reward, "parts": dict(score.parts), "error": score.error, "answer": answer}
        calls = [call.key for call in tree.calls]
        about = {"rollout": rollout, "task": _digest_of(task)}
        self._write({**about, "end": result, "counts": dict(counts), "calls": calls})

    def ended(self, rollout: RolloutId, task: Task, tree: CallTree, counts: Counter[str]) -> Score | None:
        """The result of a rollout that had ended, whose calls and counts are added; None if it had not."""
        if (line := self._ends.get(rollout)) is None or line["task"] != _digest_of(task):
            return None
        tree.calls += [self._calls[rollout, tuple(key)] for key in line["calls"]]
        counts.update(line["counts"])
        return AgentOutcome(**line["end"])

    def _write(self, line: JsonObject) -> None:
        with self._lock:
            assert self._file is not None, "begin comes first"
            self._file.write(_with_checksum(json.dumps(line).encode()) + b"\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _with_checksum(body: bytes) -> bytes:
    """As the first field of a JSON object."""
    return b'{"crc32": %d, ' % zlib.crc32(body) + body[1:]


def _digest_of(task: Task) -> str:
    return digest([task.prompt, task.messages, task.reference, task.metadata])


def _line(rollout: RolloutId, call: Call) -> JsonObject:
    return {
        "rollout": rollout,
        "key": call.key,
        "parent": None if call.parent is None else call.parent.key,
        "context": call.context_ids,
        "said": (call.said.role, call.said.text),
        "tokens": call.answer.token_ids,
        "logprobs": call.answer.logprobs,
        "text": call.answer.text,
        "finish": call.answer.finish_reason,
        "max_new_tokens": call.sampling.max_new_tokens,
        "stop": call.sampling.stop_strings,
    }
