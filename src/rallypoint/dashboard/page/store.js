// A run as the messages tell it: the first says everything, each later one what is different.

const MOST_LINES = 200;
const MOST_SPANS = 256;

const AFTER = { member: 0, confirmed: 0, confirming: 0, gone: 0, joining: 1, waiting: 2, spare: 3, "held back": 4, drained: 5, left: 6 };

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
    this.rows = null;
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
    // A card says who a node is, a spot where it stands; a node that changed is another object.
    for (const [id, name, addr, pid, labels, drain] of message.nodes || []) {
      this.nodes.set(id, { standing: "joining", rank: null, joined_at: null, ...this.nodes.get(id), id, name, addr, pid, labels, drain });
    }
    for (const [id, standing, rank, joined_at] of message.spots || []) {
      this.nodes.set(id, { ...this.nodes.get(id), standing, rank, joined_at });
    }
    for (const id of message.gone || []) this.nodes.delete(id);
    if (message.nodes || message.spots || message.gone) this.ordered = null;
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
    if (message.tracks || message.dropped) this.rows = null;
    if (message.lines) this.lines = [...this.lines, ...message.lines].slice(-MOST_LINES);
  }

  /** Nodes by rank, then the others by what they are and by name. */
  sorted() {
    if (this.ordered === null) {
      this.ordered = [...this.nodes.values()].sort(
        (a, b) =>
          AFTER[a.standing] - AFTER[b.standing] ||
          (a.rank ?? Infinity) - (b.rank ?? Infinity) ||
          this.natural(a.name, b.name) ||
          (a.id < b.id ? -1 : 1),
      );
    }
    return this.ordered;
  }

  /** Rows of the time line: by the last rank, then by name. */
  lanes() {
    if (this.rows === null) {
      this.rows = [...this.tracks.values()].sort(
        (a, b) => (a.rank ?? 1e9) - (b.rank ?? 1e9) || this.natural(a.name, b.name) || a.key - b.key,
      );
    }
    return this.rows;
  }
}
