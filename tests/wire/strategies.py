"""Hypothesis strategies for the wire: messages of all types, and frames of them."""

from typing import get_args

from hypothesis import strategies as st

from rallypoint.kv.types import (
    AddResult,
    Batch,
    BranchResult,
    Change,
    Deleted,
    Failure,
    FailureCode,
    GotItem,
    GotRange,
    Item,
    LeaseResult,
    PutDone,
    Result,
    Ticked,
    TxnResult,
)
from rallypoint.wire.messages import (
    Answer,
    AskStatus,
    Await,
    Claim,
    ClientFrame,
    Do,
    Going,
    Held,
    Hello,
    Hold,
    MakeRun,
    Push,
    RefusalCode,
    Refused,
    Status,
    WatchRefused,
    WatchStart,
    WatchStop,
    Welcome,
)
from tests.kv.strategies import ops

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.binary(max_size=50)
numbers = st.integers(0, 2**63 - 1)
seconds = st.floats(allow_nan=False)
items = st.builds(Item, texts, values, numbers, numbers, numbers, numbers)
batches = st.builds(Batch, numbers, st.lists(st.builds(Change, texts, st.none() | items), max_size=3).map(tuple))

hellos = st.builds(
    Hello,
    oldest=numbers,
    newest=numbers,
    client=texts,
    token=texts,
    run=texts,
    software=texts,
    generation=texts,
    sessions=st.lists(st.builds(Held, numbers, seconds), max_size=3).map(tuple),
)
welcomes = st.builds(
    Welcome, numbers, texts, texts, st.lists(numbers, max_size=3).map(tuple), numbers, st.booleans(), st.booleans()
)
refusals = st.builds(Refused, st.sampled_from(RefusalCode), texts)

branch_results: st.SearchStrategy[BranchResult] = st.one_of(
    st.builds(PutDone),
    st.builds(Deleted, numbers),
    st.builds(GotItem, st.none() | items),
    st.builds(GotRange, st.lists(items, max_size=3).map(tuple), numbers),
)
results: st.SearchStrategy[Result] = st.one_of(
    st.builds(TxnResult, st.booleans(), numbers, st.lists(branch_results, max_size=3).map(tuple)),
    st.builds(AddResult, st.booleans(), numbers, st.integers(-(2**63), 2**63 - 1)),
    st.builds(LeaseResult, numbers, seconds, st.booleans()),
    st.builds(Ticked, numbers),
    st.builds(Failure, st.sampled_from(FailureCode), texts, numbers),
)

CLIENT_MESSAGES = {
    Do: st.builds(Do, numbers, ops),
    WatchStart: st.builds(WatchStart, numbers, texts, numbers),
    WatchStop: st.builds(WatchStop, numbers),
    Hold: st.builds(Hold, numbers, seconds),
    Claim: st.builds(Claim, values),
    AskStatus: st.builds(AskStatus, numbers),
    Await: st.builds(Await, numbers, st.lists(texts, max_size=3).map(tuple), st.floats(0, 1e6)),
}
SERVER_MESSAGES = {
    Answer: st.builds(Answer, numbers, results),
    Push: st.builds(Push, numbers, batches),
    WatchRefused: st.builds(WatchRefused, numbers, numbers),
    Status: st.builds(Status, numbers, numbers, st.dictionaries(texts, texts, max_size=3)),
    Going: st.builds(Going, texts),
    MakeRun: st.just(MakeRun()),
}
client_frames = st.builds(ClientFrame, numbers, st.lists(st.one_of(*CLIENT_MESSAGES.values()), max_size=4).map(tuple))
server_frames = st.lists(st.one_of(*SERVER_MESSAGES.values()), max_size=4).map(tuple)


def types_of(union: object) -> set[type]:
    """The members of a union of types."""
    return set(get_args(union))
