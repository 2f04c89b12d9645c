"""The rows: problems of today's rendezvous systems, and what Rallypoint promises. Tests are named by their rows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `seen_in`: where the problem was reported, or how it was found."""

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
        "The second of two agents is stopped by Ctrl-C and started again: the first one dies with “closed”.",
        "Twenty times in a row the round re-forms, without an error.",
        "pytorch #147064",
    ),
    (
        "A node becomes rank 0",
        "Rank 0 leaves, so rank 1 becomes rank 0, and fails with an assertion: no node hosts the workers' store.",
        "The new rank 0 hosts the bootstrap store of the new round.",
        "pytorch #182221",
    ),
    (
        "A member is killed while nobody waits",
        "A member of a full round is killed. The others notice only when a collective times out, minutes later.",
        "The survivors are told within 0.8 s (on etcd: the time to live and 1 s), and re-form if `min_nodes` are left.",
        "pytorch #111646",
    ),
    (
        "A spare is there when it is needed",
        "A member is killed while a spare is there, and the spare stays a spare.",
        "The spare is promoted in the next round, within 1.3 s of the kill (on etcd: the time to live and 2 s); the "
        "survivors keep their ranks.",
        "pytorch #114097",
    ),
    (
        "More nodes than places",
        "One node more than `max_nodes` joins, and the whole job is closed for good.",
        "Nodes that do not fit are spares.",
        "NVIDIA/nvidia-resiliency-ext #348",
    ),
    (
        "Clocks that differ",
        "One machine's clock is a minute off: a healthy node is expelled, or a dead one kept.",
        "It has no effect, however far apart the clocks are.",
        "the code of other systems",
    ),
    (
        "A process that stalls",
        "An agent stalls for ten seconds (a debugger, a lock, a full disk), is expelled without notice, and goes "
        "on training in vain.",
        "Within the time to live nothing happens. Beyond it the node is told that its session is lost, and re-joins.",
        "the code of other systems",
    ),
    (
        "The machine of the store dies",
        "The job is lost together with the one process that holds its store.",
        "On etcd nothing is lost and there is a new coordinator in seconds. The embedded server is started again from "
        "its log, and running members stay members.",
        "pytorch #67742, #88626",
    ),
    (
        "A node dies while it joins",
        "A node dies after it has joined and before it has confirmed. Its place stays taken and blocks the round.",
        "The others re-form without it.",
        "the code of other systems",
    ),
    (
        "A node that fails in a loop",
        "A node joins, fails, joins again; each time the whole job is restarted.",
        "Arrivals are admitted in batches; a node that was lost several times in a row is held back, with the reason.",
        "nvidia-resiliency-ext PR #357",
    ),
    (
        "The same run id again",
        "The id of a closed job cannot be used for the next one, and the default id of all jobs is “none”.",
        "A closed run can be reopened; leftovers of an earlier incarnation have no effect; there is no shared "
        "default id.",
        "pytorch #82160",
    ),
    (
        "A thousand nodes at once",
        "All of them write one shared value by compare-and-set, and nearly all writes are refused.",
        "The cost of a round is linear in its nodes.",
        "pytorch #185930",
    ),
    (
        "The assignment of ranks",
        "node10 comes before node2, and the rank that a node asks for is ignored.",
        "The order is natural, a rank that is asked for is given, and rank 0 can be pinned to a node.",
        "pytorch #191190, #182223, #67615",
    ),
    (
        "An endpoint that is not the host name",
        "The endpoint is an alias, a second network card, a short name of Kubernetes or IPv6. No node recognises it as "
        "its own, so no node hosts the server.",
        "The node that can bind the address hosts the server.",
        "pytorch #73380, #64926",
    ),
    (
        "Strangers at the port",
        "Every client that reaches the port can send a pickle, and it is loaded.",
        "There is no pickle. A token or TLS keeps strangers out; junk, other versions, oversized frames are refused, "
        "and the server goes on.",
        "pytorch #173909",
    ),
    (
        "The server starts last",
        "The machine of the server starts minutes after the others, which have given up by then.",
        "They wait until their own deadlines, and say what they wait for.",
        "flyteorg/flytekit PR #3419",
    ),
    (
        "Below the minimum and back",
        "The job falls below its minimum; the nodes come back, and it hangs forever.",
        "The round forms as soon as the minimum is back.",
        "horovod #3494",
    ),
    (
        "The autoscaler brings more nodes",
        "Long after the start of the job new machines come, one by one, and each restarts all workers.",
        "They are admitted in one batch.",
        "requested by users of autoscalers",
    ),
    (
        "The limit on restarts",
        "Leaving and re-joining resets the count of restarts, and each node has its own count.",
        "With `rallypoint run` the budget is one number for the run.",
        "pytorch #147064, #108158",
    ),
    (
        "A world of one",
        "A tool that prints the host name is missing: every node considers itself the head, and trains alone.",
        "A node that hosts the server although it needs others logs a warning with its address and what it waits for.",
        "mlc-ai/pith-train PR #91",
    ),
    (
        "Options that are accepted and ignored",
        "`--rdzv-conf timeout=900` is silently ignored.",
        "It is an alias; an unknown name is an error that suggests the right one.",
        "the code of other systems",
    ),
    (
        "Who is missing?",
        "A time-out does not name the missing nodes, and events are discarded by default.",
        "`rallypoint why`, the error and the events name them, in the same words.",
        "many threads about hung jobs",
    ),
    (
        "Two jobs on one machine",
        "Two jobs use the same port: one fails or, worse, they become one job.",
        "Runs with different ids stay separate on one server; a second server on the same port says what uses it.",
        "many threads about taken ports",
    ),
    (
        "A barrier that a process does not reach",
        "704 processes wait at a barrier for four hours without a line in any log.",
        "`store.barrier` has a time-out, and names the ranks that are absent.",
        "marin PR #8538",
    ),
    (
        "A late node that is not rank 0",
        "It waits for the address of rank 0, which is not published again for the new round, until it fails after a "
        "minute.",
        "The address and port of rank 0 belong to each round.",
        "measured with torch 2.13",
    ),
    (
        "A server that hangs",
        "The server is paused, not dead. Clients with a time-out of 5 s hang for 40 s and more.",
        "Every call keeps its own time-out, whatever the server does.",
        "measured with torch 2.13",
    ),
    (
        "A slow name server",
        "The server looks up the name of every client in its only thread: 64 clients take 10 s.",
        "The server never looks up names.",
        "measured with torch 2.13",
    ),
    (
        "A death at the wrong moment",
        "A node dies while a round is completed, and two members of one round get different sizes.",
        "The members of a round are fixed when it is decided, and all nodes see the same ones.",
        "measured with torch 2.13 under random kills",
    ),
    (
        "A launcher of a job that communicates is lost",
        "A launcher is killed, frozen or cut off. Its peers' workers fail at once, and the loss is known later: it is "
        "counted as a worker's failure, and a job without a restart left ends.",
        "The loss explains the failures: with `rallypoint run --max-restarts 0` no restart is counted, and the job "
        "goes on.",
        "seen here, with torchrun, too",
    ),
    (
        "A closed run whose host goes",
        "The node that hosts the run closes it and dies; another node starts it again, alone.",
        "Closed stays closed for every node that was told, whoever serves next.",
        "seen here",
    ),
    (
        "“CUDA out of memory” on one rank",
        "The logs of the other nodes, the history and the page say only that nodes joined again.",
        "Rank, node, exit code and last words are in the output of every launcher, in `rallypoint history`, in "
        "`rallypoint events` and on the page, in the same words.",
        "seen here",
    ),
    (
        "The page is opened after the incident",
        "Somebody opens the page because a node was lost, and it is empty: it shows only what it has seen itself.",
        "The run keeps its events: a page that is started afterwards and `rallypoint events` show the loss and its "
        "round.",
        "seen here",
    ),
)
