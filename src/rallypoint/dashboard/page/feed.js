// One stream of server-sent events, kept open while the page is visible: updates, and how old the last one is.

const SILENT_MS = 12000;
const HIDDEN_MS = 30000;

export class Feed {
  /** `onUpdate(message)`, `onState("live" | "connecting" | "silent", seconds)`, `onRefused()`: the stream has ended. */
  constructor(path, { onUpdate, onState, onRefused }) {
    this.path = path;
    this.onUpdate = onUpdate;
    this.onState = onState;
    this.onRefused = onRefused;
    this.last = "";
    this.heardAt = performance.now();
    this.retries = 0;
    this.isClosed = false;
    this.seen = () => this.visibility();
    document.addEventListener("visibilitychange", this.seen);
    this.watch = setInterval(() => this.check(), 1000);
    this.open();
  }

  open() {
    const mark = this.last ? `${this.path.includes("?") ? "&" : "?"}after=${encodeURIComponent(this.last)}` : "";
    const source = new EventSource(this.path + mark);
    this.source = source;
    source.addEventListener("open", () => this.heard());
    source.addEventListener("update", (event) => {
      this.last = event.lastEventId;
      this.retries = 0;
      this.heard();
      this.onUpdate(JSON.parse(event.data));
    });
    source.addEventListener("heartbeat", () => this.heard());
    source.addEventListener("end", () => {
      source.close();
      this.again();
    });
    source.addEventListener("error", () => {
      this.onState("connecting", this.silentFor());
      if (source.readyState === EventSource.CLOSED) this.again();
    });
  }

  heard() {
    this.heardAt = performance.now();
    this.onState("live", 0);
  }

  silentFor() {
    return (performance.now() - this.heardAt) / 1000;
  }

  check() {
    if (this.source && performance.now() - this.heardAt > SILENT_MS) this.onState("silent", this.silentFor());
  }

  /** The stream was refused or has ended: after a pause, ask `onRefused` whether to open it again. */
  again() {
    if (this.source === null) return;
    this.source.close();
    const pause = Math.min(10000, 500 * 2 ** this.retries++) * (0.5 + Math.random() / 2);
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      const mayRead = await this.onRefused();
      if (this.isClosed || this.source === null) return; // the page was hidden or another view opened meanwhile
      if (mayRead) this.open();
      else this.close();
    }, pause);
  }

  /** A hidden page closes its stream: browsers open few connections to one server. */
  visibility() {
    clearTimeout(this.hiding);
    if (document.visibilityState === "hidden") {
      this.hiding = setTimeout(() => {
        clearTimeout(this.timer);
        this.source?.close();
        this.source = null;
      }, HIDDEN_MS);
    } else if (this.source === null) {
      this.heardAt = performance.now();
      this.open();
    }
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    clearTimeout(this.hiding);
    clearInterval(this.watch);
    document.removeEventListener("visibilitychange", this.seen);
    this.source?.close();
    this.source = null;
  }
}
