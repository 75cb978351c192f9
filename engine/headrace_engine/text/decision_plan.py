"""Decisions: questions about one input, answered by the probabilities of the labels of their options.

Each question becomes a prompt that ends where the model would write a label. The input comes first in each prompt, so
that the prefix cache serves it. A label of several tokens is read token by token, each after those before it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from secrets import token_hex
from string import ascii_uppercase
from typing import Any, Final

from headrace_engine.errors import InvalidRequestError
from headrace_engine.text.chat import joined, read_messages
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_wire.sampling import MAX_LOGPROB_TOKEN_IDS

Question = Mapping[str, Any]
"""A question that `question_problems` has checked."""

_TASK: Final = "Answer the question about the text above with the label of one option and nothing else."


@dataclass(frozen=True, slots=True)
class Reading:
    """One forward pass, which reads the log-probabilities of `token_ids` after a question and `prefix`."""

    question: int
    prefix: tuple[int, ...]
    """The first tokens of labels, at the end of the prompt."""
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class DecisionPlan:
    """The prompts of questions, and the labels of their options, as tokens. Plain data."""

    shared: list[int]
    """The beginning of every prompt: the input."""
    tails: list[list[int]]
    """The end of each question's prompt."""
    labels: list[list[list[int]]]
    """For each question, the tokens of each option's label."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the input and of all questions, each counted once."""
        return len(self.shared) + sum(map(len, self.tails))

    @property
    def longest(self) -> list[int]:
        """The longest prompt of `readings()`."""
        return self.prompt_of(max(self.readings(), key=lambda each: len(self.tails[each.question]) + len(each.prefix)))

    def readings(self) -> list[Reading]:
        """Return the forward passes that read every label, in the order of the questions."""
        return [
            Reading(question, prefix, token_ids[first : first + MAX_LOGPROB_TOKEN_IDS])
            for question, labels in enumerate(self.labels)
            for prefix, token_ids in _following(labels).items()
            for first in range(0, len(token_ids), MAX_LOGPROB_TOKEN_IDS)
        ]

    def prompt_of(self, reading: Reading) -> list[int]:
        """Return the tokens before those that it reads."""
        return [*self.shared, *self.tails[reading.question], *reading.prefix]

    def probabilities(self, found: Sequence[Mapping[int, float]]) -> list[list[float]]:
        """Return, for each question, the probability of each label among its labels.

        Args:
            found: for each of `readings()`, the log-probability of each of its tokens.
        """
        last: dict[tuple[int, ...], float] = {}
        for reading, logprobs in zip(self.readings(), found, strict=True):
            for token_id in reading.token_ids:
                last[reading.question, *reading.prefix, token_id] = logprobs[token_id]
        return [
            _shares([sum(last[question, *label[: at + 1]] for at in range(len(label))) for label in labels])
            for question, labels in enumerate(self.labels)
        ]


def _following(labels: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return, for each beginning of a label, the tokens that follow it in labels."""
    following: dict[tuple[int, ...], dict[int, None]] = {}
    for label in labels:
        for at, token_id in enumerate(label):
            following.setdefault(tuple(label[:at]), {})[token_id] = None
    return {prefix: [*token_ids] for prefix, token_ids in following.items()}


def _shares(logprobs: Sequence[float]) -> list[float]:
    highest = max(logprobs)
    weights = [math.exp(each - highest) for each in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def plan_of(
    given: str | Sequence[Mapping[str, Any]], questions: Sequence[Question], tokenizer: ModelTokenizer
) -> DecisionPlan:
    """Render the questions about an input by the model's chat template, and tokenise them.

    Raises InvalidRequestError if the model has no chat template, the template does not show the question, or the
    tokenizer does not tell the labels apart.
    """
    mark = token_hex(16)
    rendered = tokenizer.render_chat(_conversation(given, mark))
    before, _, after = rendered.partition(mark)
    if rendered.count(mark) != 1:
        raise InvalidRequestError("the model's chat template does not show the last message once, so it cannot decide")
    labels = {count: _labels(count, tokenizer) for count in {len(options_of(question)) for question in questions}}
    return DecisionPlan(
        tokenizer.encode_plain(before),
        [tokenizer.encode_plain(text_of_question(question) + after) for question in questions],
        [labels[len(options_of(question))] for question in questions],
    )


def _conversation(given: str | Sequence[Mapping[str, Any]], question: str) -> list[dict[str, Any]]:
    """Return the chat that asks a question about an input.

    The question continues a last user message: many chat templates refuse two user messages in a row.
    What is the same for all questions comes before the question, so that it is computed once.
    """
    messages = read_messages([{"role": "user", "content": given}] if isinstance(given, str) else given)
    asked = f"{_TASK}\n\n{question}"
    last = messages[-1]
    if last["role"] == "user":
        return [*messages[:-1], {**last, "content": f"{joined(last['content'])}\n\n{asked}"}]
    return [*messages, {"role": "user", "content": asked}]


def _labels(count: int, tokenizer: ModelTokenizer) -> list[list[int]]:
    """Return the tokens of labels. None of them begins with another, so the probabilities exclude each other."""
    labels = [tokenizer.encode_plain(label) for label in label_texts(count)]
    ordered = sorted(labels)  # a label stands right before those that begin with it
    if any(after[: len(label)] == label for label, after in pairwise(ordered)):
        raise InvalidRequestError(f"the model's tokenizer does not tell {count} labels apart, so it cannot decide")
    return labels


_PREDICATE: Final = ({"value": "true"}, {"value": "false"})


def options_of(question: Question) -> Sequence[Mapping[str, Any]]:
    """Return the options of a question. Those of a predicate are true and false."""
    return question.get("choices") or question.get("levels") or _PREDICATE


def label_texts(count: int) -> list[str]:
    """Return as many labels: A, B, C; or AA, AB, AC, if there are more options than letters."""
    if count <= len(ascii_uppercase):
        return [*ascii_uppercase[:count]]
    return [first + second for first in ascii_uppercase for second in ascii_uppercase][:count]


def text_of_question(question: Question) -> str:
    """Return a question with its options, each after its label."""
    options = options_of(question)
    lines = [f"{label}: {_shown(option)}" for label, option in zip(label_texts(len(options)), options, strict=True)]
    return "\n".join([question["instructions"], *lines])


def _shown(option: Mapping[str, Any]) -> str:
    value = option["value"] if option.get("label") is None else option["label"]
    text = str(value).lower() if isinstance(value, bool) else value
    return f"{text} ({option['description']})" if option.get("description") else text


def answers_of(
    questions: Sequence[Question], plan: DecisionPlan, found: Sequence[Mapping[int, float]]
) -> list[dict[str, Any]]:
    """Return the answers in the form of OpenAI's decisions. `found`: see `DecisionPlan.probabilities`."""
    shares = plan.probabilities(found)
    return [_answer(question, probabilities) for question, probabilities in zip(questions, shares, strict=True)]


def _answer(question: Question, probabilities: Sequence[float]) -> dict[str, Any]:
    """Return the answer to a question.

    `confidence` is the highest probability. A score is the expectation of the levels' values, which are 0, 1, 2 and so
    on in their order.
    """
    kind = question["type"]
    about = {"type": kind, "name": question.get("name")}
    if kind == "predicate":
        return {**about, "probability": probabilities[0]}
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    options, confidence = options_of(question), probabilities[best]
    if kind == "choice":
        shares = [
            {"value": option["value"], "probability": share}
            for option, share in zip(options, probabilities, strict=True)
        ]
        return {**about, "choice": options[best]["value"], "confidence": confidence, "probabilities": shares}
    levels = [
        {"label": option["label"], "value": value, "probability": share}
        for value, (option, share) in enumerate(zip(options, probabilities, strict=True))
    ]
    score = math.fsum(value * share for value, share in enumerate(probabilities))
    return {**about, "score": score, "confidence": confidence, "probabilities": levels}
