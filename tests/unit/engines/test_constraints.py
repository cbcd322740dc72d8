"""Sessions whose answers obey grammars, in step with the host and one step ahead of it (simulated graphs)."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_decode_ahead import simulate_graphs
from test_native_session import Answers, run
from tiny_models import LOGPROB_ROUNDING, byte_tokenizer, tiny_model
from torch import nn

from posttrain.data.answer_grammars import AnswerGrammar
from posttrain.data.tool_calls import FORMATS
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.constraints import Constraint
from posttrain.engines.native.session import FailureEvent, GenerationSession, SessionRequest
from posttrain.errors import InputError
from posttrain.types import Sampling

TOKENIZER = byte_tokenizer()
SETTINGS = NativeSettings(page_size=4, max_batch_size=4, max_total_tokens=120)
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
GRAMMAR = AnswerGrammar(FORMATS["hermes"], TOKENIZER, prompt="").of_schema(SCHEMA)
HOT = Sampling(60, temperature=1.5)


@pytest.fixture(params=["in step", "ahead"], autouse=True)
def is_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "ahead":
        simulate_graphs(monkeypatch)
    return bool(request.param == "ahead")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("llama", vocab_size=264, eos_token_id=TOKENIZER.eos_token_id)  # four columns of padding


def session_of(model: nn.Module, **settings: Any) -> GenerationSession:
    return GenerationSession(NativeEngine(model, TOKENIZER, SETTINGS.model_copy(update=settings)))


def mixed() -> list[SessionRequest]:
    """Constrained and free, of different settings."""
    samplings = [HOT, replace(HOT, temperature=0.0), replace(HOT, top_p=0.9), replace(HOT, top_k=20)]
    return [
        SessionRequest(
            f"r{index}",
            tuple(range(5, 8 + index)),
            samplings[index % 4],
            seed=index,
            num_samples=1 + index % 2,
            num_top_logprobs=2 * (index % 3),
            grammar=GRAMMAR if index % 3 else "",
        )
        for index in range(9)
    ]


def text_of(events: list[Any]) -> str:
    return str(TOKENIZER.decode([event.token_id for event in events], skip_special_tokens=True))


def ids_of(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: [event.token_id for event in events] for key, events in answers.items()}


def test_a_random_model_writes_what_the_schema_says(model: nn.Module) -> None:
    answers = run(session_of(model), mixed())
    for (name, _), events in answers.items():
        if int(name[1:]) % 3:
            value = json.loads(text_of(events))
            assert set(value) == {"unit", "days"}
            assert value["unit"] in ("C", "F")
            assert 1 <= value["days"] <= 99
            assert (events[-1].token_id, events[-1].finish_reason) == (TOKENIZER.eos_token_id, "stop")


def test_answers_do_not_depend_on_those_beside_them(model: nn.Module) -> None:
    """Neither the constrained ones nor the free."""
    together = ids_of(run(session_of(model), mixed()))
    alone = {}
    for one in mixed():
        alone.update(ids_of(run(session_of(model), [one])))
    assert together == alone


def test_preempted_answers_keep_their_state(model: nn.Module) -> None:
    wanted = [replace(one, num_samples=2) for one in mixed()]
    expected = ids_of(run(session_of(model), wanted))
    page_bytes = 4 * 2 * 2 * 2 * 8 * 4 * 2
    tight = session_of(model, kv_cache_gib=34 * page_bytes / 2**30)
    assert ids_of(run(tight, wanted)) == expected
    assert tight.counts.num_preemptions > 0


def test_log_probabilities_are_those_of_the_masked_distribution(model: nn.Module) -> None:
    prompt = (5, 6, 7)
    request = SessionRequest("a", prompt, HOT, seed=3, num_top_logprobs=3, grammar=GRAMMAR)
    events = run(session_of(model), [request])["a", 0]
    ids = [event.token_id for event in events]
    reference = tiny_model("llama", vocab_size=264, eos_token_id=TOKENIZER.eos_token_id, attention="eager")
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *ids]])).logits[0].double()
    state = Constraint(TOKENIZER, GRAMMAR)
    for place, event in enumerate(events):
        mask = state.matcher.compute_bitmask()
        allowed = [token for token in range(len(TOKENIZER)) if mask[token // 8] >> token % 8 & 1]
        assert event.token_id in allowed
        row = torch.full((264,), -torch.inf, dtype=torch.float64)
        row[allowed] = logits[len(prompt) - 1 + place, allowed] / HOT.temperature
        row = row.log_softmax(dim=-1)
        assert event.logprob == pytest.approx(float(row[event.token_id]), abs=LOGPROB_ROUNDING)
        best = row.topk(min(3, len(allowed)))
        assert [token for token, _ in event.candidates[: len(best.indices)]] == best.indices.tolist()
        state.accept(event.token_id)
    assert any(event.logprob == 0.0 for event in events), "a token that is forced is certain"


def test_a_stop_token_of_the_request_ends_where_the_grammar_may_end(model: nn.Module) -> None:
    ending = replace(HOT, end_of_turn_ids=(TOKENIZER.pad_token_id,))
    reasons = set()
    for seed in range(12):
        events = run(session_of(model), [SessionRequest("a", (5, 6), ending, seed=seed, grammar=GRAMMAR)])["a", 0]
        json.loads(text_of(events))
        reasons.add(events[-1].token_id)
    assert reasons == {TOKENIZER.eos_token_id, TOKENIZER.pad_token_id}


def test_a_grammar_that_fails_ends_its_request_only(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Constraint.accept

    def failing(self: Constraint, token_id: int) -> None:
        accept(self, token_id)
        if getattr(self, "is_bad", False):
            self.matcher.consume_token(TOKENIZER.pad_token_id)  # not in the grammar

    monkeypatch.setattr(Constraint, "accept", failing)
    session = session_of(model)
    good, bad, free = mixed()[1], replace(mixed()[2], id="bad"), mixed()[3]
    for one in (good, bad, free):
        session.add(one)
    for sample in session._requests["bad"].samples:
        sample.constraint.is_bad = True  # type: ignore[union-attr]
    found: dict[str, list[Any]] = defaultdict(list)
    while session.unfinished:
        for event in session.step():
            found[event.request_id].append(event)
    assert isinstance(found["bad"][-1], FailureEvent)
    assert "grammar" in found["bad"][-1].message
    assert {event.finish_reason for name in (good.id, free.id) for event in found[name]} >= {"stop"}
    assert session.counts.pages_in_use == 0


def test_a_grammar_that_cannot_be_compiled_is_refused(model: nn.Module) -> None:
    with pytest.raises(InputError):
        session_of(model).add(SessionRequest("a", (5,), HOT, seed=0, grammar="start: oops"))
