"""`kvchat bench --store`: what keeping chats costs, and how quickly they are found among many."""

from __future__ import annotations

import json
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import kvchat
from kvchat.bench import speed, texts
from kvchat.bench.plan import LoadSettings
from kvchat.bench.result import rounded
from kvchat.chat.changes import Changes
from kvchat.chat.commands import Regenerate
from kvchat.chat.conversation import Conversation
from kvchat.chat.events import ChatEvent, CommandFinished, ModelLoaded
from kvchat.chat.nodes import Node
from kvchat.chat.saver import Saver
from kvchat.chat.session import ChatSession
from kvchat.chat.store import Store
from kvchat.engine.types import CANDIDATES, Candidates
from kvchat.models.load import LanguageModel, load

RARE = "quokka"
"""Stands in one message of a thousand."""
QUERIES = ("harbour", "harbour pier", "h", RARE, '"old ferry"', "公园", "公", "→", "absent")
"""What is searched for: frequent words and rare ones, beginnings, phrases, symbols, nothing."""

_PARK = "昨天我们去了公园里散步。"
_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """How much is kept, and how much is measured."""

    chats: int = 10_000
    messages: int = 10
    """Of each chat."""
    message_tokens: int = 24
    branches: int = 500
    """Of the chat in which the timed reply is written, each a message and a reply to it."""
    reply_tokens: int = 256
    repeats: int = 5
    """Of everything; of what a user waits for the longest is reported."""

    @classmethod
    def quick(cls) -> StorePlan:
        """A run of some seconds on a small model, for a first look."""
        return cls(chats=1_000, reply_tokens=128, repeats=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """All figures of one run; the fields are the keys of the JSON."""

    kvchat: str
    model: str
    chats: int
    messages: int
    """In all of them."""
    store_bytes: int
    hand_over_ms_max: float
    """Longest that the engine's thread was held up while a reply was written, by any event."""
    hand_over_ms_p99: float
    saving_share: float
    """By how much of its time a reply takes longer when it is saved; medians, one after another."""
    saving_cpu_share: float
    """CPU time that saving took, on both threads, of a reply's time."""
    list_ms: float
    search_ms: dict[str, float]
    """By query."""
    open_ms: float
    start_ms: float
    """Until chats can be opened in a program that has just begun."""
    start_empty_ms: float
    """The same without any chats."""
    plan: StorePlan

    @property
    def search_ms_max(self) -> float:
        """That of the slowest query."""
        return max(self.search_ms.values())

    @property
    def start_longer_ms(self) -> float:
        """How much longer a start takes with all these chats."""
        return self.start_ms - self.start_empty_ms

    def to_json(self) -> str:
        """Return one line of JSON; figures have five significant digits."""
        return json.dumps(rounded(asdict(self)), ensure_ascii=False)


class _TimedStore(Store):
    """A store that knows what writing has cost its thread."""

    cpu_s = 0.0

    def write(self, changes: Changes) -> None:
        """Write, on the saver's thread."""
        began = time.thread_time()
        super().write(changes)
        self.cpu_s += time.thread_time() - began


def run(
    settings: LoadSettings, plan: StorePlan, progress: Callable[[str], None] = lambda _: None
) -> StoreResult:
    """Load a model and measure.

    Raises:
        KvchatError: the model does not load, or there is no room for the chats.
    """
    progress("loading the model")
    return measure(load(settings.model, **settings.arguments()), plan, progress)


def measure(
    llm: LanguageModel, plan: StorePlan, progress: Callable[[str], None] = lambda _: None
) -> StoreResult:
    """Measure with a loaded model, in a folder that is removed afterwards."""
    with TemporaryDirectory(prefix="kvchat-bench-") as folder:
        path = Path(folder) / "chats.db"
        progress(f"writing {plan.chats:,} chats")
        chats = Store(path)
        for batch in _batches(_chats(plan)):
            chats.save_all(batch)
        chats.close()
        progress("list, search, open, start")
        store = _TimedStore(path)
        listed = store.chats()
        some = random.Random(0).sample(listed, min(20, len(listed)))
        list_ms = _longest(plan.repeats, store.chats)
        search_ms = {q: _longest(plan.repeats, partial(store.search, q)) for q in QUERIES}
        open_ms = max(_longest(plan.repeats, partial(store.load, chat.id)) for chat in some)
        start_ms, start_empty_ms = (
            _longest(plan.repeats, partial(_start, each))
            for each in (path, Path(folder, "none.db"))
        )
        progress(f"replies of {plan.reply_tokens} tokens")
        replies = _Replies(llm, plan, store)
        return StoreResult(
            kvchat=kvchat.__version__,
            model=llm.name,
            chats=len(listed),
            messages=sum(chat.messages for chat in listed),
            store_bytes=path.stat().st_size,
            hand_over_ms_max=max(replies.hand_over_ms),
            hand_over_ms_p99=quantiles(replies.hand_over_ms, n=100)[-1],
            saving_share=replies.share,
            saving_cpu_share=replies.cpu_share,
            list_ms=list_ms,
            search_ms=search_ms,
            open_ms=open_ms,
            start_ms=start_ms,
            start_empty_ms=start_empty_ms,
            plan=plan,
        )


class _Replies:
    """Replies in a chat with many branches, saved and not saved by turns.

    Attributes:
        hand_over_ms: how long each event of the saved ones was held up.
        share: by how much of its time a reply takes longer when it is saved.
        cpu_share: CPU time of saving as a share of the replies' time.
    """

    def __init__(self, llm: LanguageModel, plan: StorePlan, store: _TimedStore) -> None:
        self.hand_over_ms: list[float] = []
        chat = Conversation()
        first = chat.add_user(texts.message(llm.tokenizer, plan.message_tokens, 0))
        for nth in range(plan.branches):
            text = texts.message(llm.tokenizer, plan.message_tokens, nth)
            user = chat.edit_user(first.id, text) if nth else first
            _write_reply(chat, user, plan.message_tokens, nth)
        store.save(chat)
        self._saver = Saver(store)
        self._session = ChatSession(
            llm,
            conversation=self._saver.open(chat.id),
            params=llm.defaults.updated(seed=0, max_tokens=plan.reply_tokens),
        )
        self._saver.note(ModelLoaded(self._session))
        saved, unsaved = [], []
        with speed.forced_length(llm.engine, llm.tokenizer.control_ids):
            self._reply(save=True)  # warms up
            self.hand_over_ms.clear()
            cpu_s = 0.0
            for nth in range(plan.repeats):
                if nth % 2:  # neither of them is always the first
                    unsaved.append(self._reply(save=False))
                began = store.cpu_s
                saved.append(self._reply(save=True))
                cpu_s += store.cpu_s - began
                if not nth % 2:
                    unsaved.append(self._reply(save=False))
        self._saver.close()
        pairs = zip(saved, unsaved, strict=True)
        self.share = median(with_it / without for with_it, without in pairs) - 1
        self.cpu_share = (sum(self.hand_over_ms) / 1e3 + cpu_s) / sum(saved)

    def _reply(self, *, save: bool) -> float:
        """Write a reply and return the seconds it took."""
        began = time.perf_counter()
        for event in self._session.regenerate():
            if save:
                self._hand_over(event)
        seconds = time.perf_counter() - began
        self._saver.note(CommandFinished(Regenerate()))  # saves what is not saved yet
        self._saver.flush()
        return seconds

    def _hand_over(self, event: ChatEvent) -> None:
        began = time.perf_counter()
        self._saver.note(event)
        self.hand_over_ms.append((time.perf_counter() - began) * 1e3)


def _start(path: Path) -> None:
    """Do what a program does before the first chat can be opened."""
    store = Store(path)
    saver = Saver(store)
    saver.call(store.last)
    saver.flush()
    saver.close()


def _longest(tries: int, do: Callable[[], object]) -> float:
    """Milliseconds of the longest of several tries."""
    took = []
    for _ in range(tries):
        began = time.perf_counter()
        do()
        took.append((time.perf_counter() - began) * 1e3)
    return max(took)


def _chats(plan: StorePlan) -> Iterator[Conversation]:
    for nth in range(plan.chats):
        chat = Conversation()
        for turn in range(plan.messages // 2):
            words = texts.words_from(nth + 7 * turn)
            user = chat.add_user(f"{words[:120]} {_PARK if nth % 3 == turn else ''}")
            _write_reply(chat, user, plan.message_tokens, nth + turn)
        yield chat


def _write_reply(chat: Conversation, user: Node, tokens: int, nth: int) -> None:
    """Reply as a model does, with all that is known of each token."""
    node = chat.start_reply(user.id)
    reply = node.reply
    assert reply is not None
    ids, reply.before, reply.after = _drawn(tokens, nth % 50)
    reply.token_ids = array("i", ids)
    reply.logprobs = array("f", [-0.5] * tokens)
    reply.ms = array("f", [8.0] * tokens)
    chat.add_text(node.id, texts.words_from(nth)[:180] + (f" {RARE}" if nth % 1000 == 0 else ""))
    chat.finish_reply(node.id, "stop", stop_id=2, context_ids=[*chat.context_ids(user.id), *ids, 2])


@cache
def _drawn(tokens: int, nth: int) -> tuple[list[int], list[Candidates], list[Candidates]]:
    """Return ids and their candidates before and after the sampler."""
    ids = [(nth * 31 + n * 17) % 30_000 for n in range(tokens)]
    near = array("f", [-0.1 * n for n in range(CANDIDATES)])
    before = [Candidates(array("i", range(i, i + CANDIDATES)), near) for i in ids]
    return ids, before, [Candidates(c.ids[:8], c.logprobs[:8]) for c in before]


def _batches(chats: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    each = iter(chats)
    while batch := list(islice(each, _BATCH)):
        yield batch
