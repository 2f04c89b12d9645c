"""The rows: what hurts users of rendezvous today, and what has to happen instead. The tests are named by them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `seen_in`: where somebody wrote about it, or how it was found."""

    number: int
    title: str
    hurt: str
    instead: str
    seen_in: str


def _rows(*rows: tuple[str, str, str, str]) -> dict[int, Row]:
    return {number: Row(number, *row) for number, row in enumerate(rows, start=1)}


ROWS = _rows(
    (
        "An agent is stopped and started again",
        "Ctrl-C in the terminal of the second of two agents, then the same command again: the first one dies of "
        "“closed”.",
        "Twenty times in a row the round re-forms, without an error.",
        "pytorch #147064",
    ),
    (
        "A node becomes rank 0",
        "Rank 0 leaves, so rank 1 becomes rank 0, and fails with an assertion: nobody serves the store that workers "
        "meet on.",
        "The new rank 0 serves the bootstrap store of the new round.",
        "pytorch #182221",
    ),
    (
        "A member is killed while nobody waits",
        "A member of a complete round is killed. The others learn of it when a collective times out, minutes later.",
        "The survivors are told within 1.5 s (on etcd: the time to live and 1 s), and re-form if `min_nodes` are left.",
        "pytorch #111646",
    ),
    (
        "A spare is there when it is needed",
        "A member is killed, a spare stands by, and stays a spare.",
        "The spare is promoted in the next round, within 2 s of the kill (on etcd: the time to live and 2 s); the "
        "survivors keep their ranks.",
        "pytorch #114097",
    ),
    (
        "More nodes than places",
        "One node more than `max_nodes` and the whole job is closed for good.",
        "Those who do not fit are spares.",
        "NVIDIA/nvidia-resiliency-ext #348",
    ),
    (
        "Clocks that differ",
        "One machine's clock is a minute off: a healthy node is expelled, or a dead one kept.",
        "It has no effect, however far apart the clocks are.",
        "the code of others",
    ),
    (
        "A process that stands still",
        "An agent stands still for ten seconds (a debugger, a lock, a full disk), is expelled without a word, and goes "
        "on training for nobody.",
        "Within the time to live nothing happens. Beyond it the node is told, and joins again.",
        "the code of others",
    ),
    (
        "The machine of the store dies",
        "The job is lost with the one process that held its store.",
        "On etcd nothing is lost and there is a new coordinator in seconds. The embedded server is started again from "
        "its log, and running members stay members.",
        "pytorch #67742, #88626",
    ),
    (
        "A node dies half-way in",
        "A node dies after it has joined and before it has confirmed. Its slot stays taken and blocks the round.",
        "The others re-form without it.",
        "the code of others",
    ),
    (
        "A node that fails in a loop",
        "A node joins, fails, joins again; each time the whole job is restarted.",
        "Arrivals are admitted in batches; a node that was lost several times in a row is held back, with the reason.",
        "nvidia-resiliency-ext PR #357",
    ),
    (
        "The same run id again",
        "The id of a job that was closed is poisoned for the next one, and the default id is “none” for everybody.",
        "A closed run can be reopened; what an earlier life left behind never touches the next; there is no shared "
        "default id.",
        "pytorch #82160",
    ),
    (
        "A thousand nodes at once",
        "All of them write one shared value by compare-and-set, and nearly all of the writes are refused.",
        "The cost of a round is linear in its nodes.",
        "pytorch #185930",
    ),
    (
        "Who gets which rank",
        "node10 comes before node2, and the rank that a node asks for is ignored.",
        "The order is natural, a rank that is asked for is given, and rank 0 can be pinned to a node.",
        "pytorch #191190, #182223, #67615",
    ),
    (
        "An endpoint that is not the host name",
        "The endpoint is an alias, a second network card, a short name of Kubernetes or IPv6. Nobody takes it for its "
        "own, so nobody serves.",
        "Whoever can bind the address serves.",
        "pytorch #73380, #64926",
    ),
    (
        "Strangers at the port",
        "Whoever reaches the port can send a pickle, and it is loaded.",
        "There is no pickle. A token or TLS; junk, other versions and oversized frames are refused, and the server "
        "lives on.",
        "pytorch #173909",
    ),
    (
        "The server comes last",
        "The machine with the server starts minutes after the others, and by then they have given up.",
        "They wait until their own deadlines, and say what they wait for.",
        "flyteorg/flytekit PR #3419",
    ),
    (
        "Below the minimum and back",
        "The job falls below its minimum; the nodes come back, and it stands still for ever.",
        "The round forms as soon as the minimum is back.",
        "horovod #3494",
    ),
    (
        "The autoscaler brings more nodes",
        "Long after the job has begun new machines come, one by one, and each restarts all workers.",
        "They are admitted in one batch.",
        "wanted by whoever scales",
    ),
    (
        "The limit on restarts",
        "Leaving and joining again resets the count of restarts, and each node counts for itself.",
        "With `rallypoint run` the budget is one number for the run.",
        "pytorch #147064, #108158",
    ),
    (
        "A world of one",
        "A tool that prints the host name is missing, every node takes itself for the head, and each trains alone.",
        "A node that serves itself although it needs others says loudly where it listens and for whom it waits.",
        "mlc-ai/pith-train PR #91",
    ),
    (
        "Options that are accepted and ignored",
        "`--rdzv-conf timeout=900` does nothing, and nobody says so.",
        "It is an alias; an unknown name is an error that suggests the right one.",
        "the code of others",
    ),
    (
        "Who is missing?",
        "A time-out does not say whom it waited for, and events go nowhere by default.",
        "`rallypoint why`, the text of the error and the events say it, in the same words.",
        "many threads about hung jobs",
    ),
    (
        "Two jobs on one machine",
        "Two jobs want one port: one fails or, worse, they become one job.",
        "Runs are told apart by their ids on one server; a second server on a taken port says who has it.",
        "many threads about taken ports",
    ),
    (
        "A barrier that somebody does not reach",
        "704 processes stand at a barrier for four hours without a line in any log.",
        "`store.barrier` has a time-out, and names the ranks that are absent.",
        "marin PR #8538",
    ),
    (
        "A late node that is not rank 0",
        "It waits for the address of rank 0, which nobody publishes again for the new round, until it fails after a "
        "minute.",
        "The address and port of rank 0 belong to each round.",
        "measured with torch 2.13",
    ),
    (
        "A server that hangs",
        "The server is paused, not dead. Clients with a time-out of 5 s stand still for 40 s and more.",
        "Every call keeps its own time-out, whatever the other side does.",
        "measured with torch 2.13",
    ),
    (
        "A slow name server",
        "The server looks up the name of every client that connects, in its only thread: 64 clients take 10 s.",
        "No path of the server looks up a name.",
        "measured with torch 2.13",
    ),
    (
        "A death at the wrong moment",
        "A third node dies while a round is completed, and two members of one round are told different sizes.",
        "The members of a round are fixed when it is decided, and are the same for everybody.",
        "measured with torch 2.13 under random kills",
    ),
)
