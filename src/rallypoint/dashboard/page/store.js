// The data of a run, from its updates: the first is complete, each later one is a difference.

const MOST_LINES = 200;
const MOST_SPANS = 256;

const ORDER = { member: 0, confirmed: 0, confirming: 0, gone: 0, joining: 1, waiting: 2, spare: 3, "held back": 4, drained: 5, left: 6 };

export class RunStore {
  constructor(natural) {
    this.natural = natural;
    this.offset = 0;
    this.clear();
  }

  clear() {
    this.state = null;
    this.rounds = [];
    this.nodes = new Map();
    this.tracks = new Map();
    this.trackOf = new Map();
    this.lines = [];
    this.ordered = null;
    this.orderedTracks = null;
  }

  /** The clock of the server, in seconds. */
  now() {
    return Date.now() / 1000 + this.offset;
  }

  apply(message) {
    if (message.full) this.clear();
    this.offset = message.now - Date.now() / 1000;
    if (message.state) this.state = message.state;
    if (message.rounds) this.rounds = message.rounds;
    // A node that changed becomes a new object: the table redraws only those.
    for (const [id, name, addr, pid, labels, drain] of message.nodes || []) {
      this.nodes.set(id, { standing: "joining", rank: null, joined_at: null, ...this.nodes.get(id), id, name, addr, pid, labels, drain });
    }
    for (const [id, standing, rank, joined_at] of message.node_states || []) {
      this.nodes.set(id, { ...this.nodes.get(id), standing, rank, joined_at });
    }
    for (const id of message.gone || []) this.nodes.delete(id);
    if (message.nodes || message.node_states || message.gone) this.ordered = null;
    for (const [key, name, id, rank, spans] of message.tracks || []) {
      let track = this.tracks.get(key);
      if (track === undefined) {
        track = { key, name, id, rank, spans };
        this.tracks.set(key, track);
      } else {
        this.trackOf.delete(track.id);
        track.id = id;
        track.rank = rank;
        track.spans.push(...spans);
        if (track.spans.length > MOST_SPANS) track.spans.splice(0, track.spans.length - MOST_SPANS);
      }
      this.trackOf.set(id, track);
    }
    for (const key of message.dropped || []) {
      this.trackOf.delete(this.tracks.get(key)?.id);
      this.tracks.delete(key);
    }
    if (message.tracks || message.dropped) this.orderedTracks = null;
    if (message.lines) this.lines = [...this.lines, ...message.lines].slice(-MOST_LINES);
  }

  /** Nodes by rank, then those without one by standing and name. */
  sorted() {
    if (this.ordered === null) {
      this.ordered = [...this.nodes.values()].sort(
        (a, b) =>
          ORDER[a.standing] - ORDER[b.standing] ||
          (a.rank ?? Infinity) - (b.rank ?? Infinity) ||
          this.natural(a.name, b.name) ||
          (a.id < b.id ? -1 : 1),
      );
    }
    return this.ordered;
  }

  /** Tracks of the time line, by last rank, then by name. */
  sortedTracks() {
    if (this.orderedTracks === null) {
      this.orderedTracks = [...this.tracks.values()].sort(
        (a, b) => (a.rank ?? 1e9) - (b.rank ?? 1e9) || this.natural(a.name, b.name) || a.key - b.key,
      );
    }
    return this.orderedTracks;
  }
}
