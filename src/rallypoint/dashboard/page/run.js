// The view of one run.

import { confirmed } from "./confirm.js";
import { arrange, byId, h, moment, natural, say, sayWords, show } from "./dom.js";
import { NodeTable } from "./nodes.js";
import { RoundTable } from "./rounds.js";
import { RunStore } from "./store.js";
import { Timeline } from "./timeline.js";

const TILES = [
  ["Members", "member", ["member", "confirmed", "confirming"]],
  ["Joining", "joining", ["joining", "confirmed", "confirming"]],
  ["Waiting", "waiting", ["waiting"]],
  ["Spare", "spare", ["spare"]],
  ["Held back", "held back", ["held back"]],
  ["Asked to go", "drained", ["drained"]],
  ["Lost or gone", "lost", ["gone"]],
  ["Refused", "refused", []],
];
const SAID_MS = 3000;

export function runView(runId, viewer, open) {
  const store = new RunStore(natural);
  const title = h("h1", { class: "run-id", title: runId });
  sayWords(title, runId);
  const pill = h("span", { class: "pill" }, "…");
  const round = h("span", { class: "faint" });
  const facts = h("p", { class: "why" }, "Looking …");
  const advice = h("p", { class: "advice" });
  const hints = h("p", { class: "hints" });
  const commands = h("ul", { class: "commands" });
  const more = h("details", { class: "more" }, h("summary", {}, "Commands"), commands);
  const close = h("button", { type: "button", class: "plain", hidden: true, onclick: () => act("close") }, "Close run");
  const reopen = h("button", { type: "button", class: "plain", hidden: true, onclick: () => act("reopen") }, "Reopen run");
  const done = h("p", { class: "done", role: "status" });
  const hero = h(
    "section", { class: "card hero", "aria-label": "How it stands" },
    h("div", { class: "head" }, title, pill, round, h("span", { class: "grow" }), close, reopen), advice, facts, hints, more, done,
  );
  const nodes = new NodeTable(store, viewer.may_act, (node) => drain(node));
  const tiles = TILES.map(([name, state, standings]) => {
    const number = h("span", { class: "number" }, "0");
    const extra = h("span", { class: "extra" });
    const button = h("button", { type: "button", class: "tile", "data-state": state, "aria-pressed": "false", onclick: () => choose(tile) }, h("span", { class: "number-line" }, number, extra), h("span", { class: "name" }, name));
    const tile = { button, number, extra, standings, state };
    return tile;
  });
  const timeline = new Timeline(store);
  const rounds = new RoundTable(store);
  const list = h("ol", { class: "lines", "aria-label": "What happened, the latest first" });
  const happened = h("section", { class: "card happened", "aria-labelledby": "lines-title" }, h("div", { class: "head" }, h("h2", { id: "lines-title" }, "What happened")), h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "What happened" }, list));
  const rest = h("div", { class: "rest" }, timeline.element, h("div", { class: "columns" }, nodes.element, happened), rounds.element);
  const group = h("div", { class: "tiles", role: "group", "aria-label": "Nodes by standing; press to show only those" }, tiles.map((tile) => tile.button));
  const back = h("a", {
    class: "back", href: "/", onclick: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      open("/");
    },
  }, "‹ All runs");
  const element = h("div", {}, viewer.only === null ? back : null, hero, group, rest);
  const lineRows = new Map();
  let announced = 0;
  let pending = 0;
  let saying = "";

  function choose(tile) {
    const pressed = tile.button.getAttribute("aria-pressed") === "true";
    for (const one of tiles) one.button.setAttribute("aria-pressed", String(one === tile && !pressed));
    nodes.only(pressed ? null : tile.standings);
  }

  async function act(name) {
    const isClose = name === "close";
    const said = await confirmed(name, { run: runId }, {
      title: isClose ? `Close run ${runId}?` : `Reopen run ${runId}?`,
      text: isClose
        ? "Nobody can join any more, and whoever waits is told. A current round goes on until its members leave it."
        : "Nodes can join again.",
      button: isClose ? "Close run" : "Reopen run",
      isGrave: isClose,
    });
    if (said !== null) say(done, said);
  }

  async function drain(node) {
    const said = await confirmed("drain", { run: runId, node: node.id }, {
      title: `Ask ${node.name} to go?`,
      text: node.standing === "member"
        ? "It is told, and leaves when its program re-joins; the round goes on until then."
        : "It leaves at once, with success.",
      button: "Drain",
      isGrave: true,
    });
    if (said !== null) say(done, said.replace(node.id, node.name));
  }

  function drawState() {
    const state = store.state;
    if (state === null || state.phase === null) return;
    pill.dataset.tone = state.tone;
    say(pill, state.phase === "absent" ? "no such run" : state.phase);
    hero.dataset.mood = state.trouble ? "bad" : state.edge;
    const sizes = state.sizes.max_nodes ? `${state.sizes.min_nodes}${state.sizes.max_nodes === state.sizes.min_nodes ? "" : `–${state.sizes.max_nodes}`} nodes` : "";
    const current = state.round ? `Round ${state.round.number}` : "No round yet";
    const since = state.round?.active_at && state.round.phase === "active" ? `since ${moment(state.round.active_at, store.now())}` : "";
    say(round, state.phase === "absent" ? "" : [current, since, sizes, state.coordinator ? `decided by ${state.coordinator}` : "", state.restarts].filter(Boolean).join(" · "));
    sayWords(advice, state.advice.join(" "));
    sayWords(facts, state.facts.join(" "));
    sayWords(hints, state.hints.join(" "));
    drawCommands(state.commands);
    show(close, viewer.may_act && state.phase !== "absent" && !state.is_closed);
    show(reopen, viewer.may_act && state.phase !== "absent" && state.is_closed);
    for (const tile of tiles) {
      const count = state.tiles[tile.state];
      say(tile.number, count.toLocaleString("en"));
      tile.button.classList.toggle("none", count === 0);
    }
    say(tiles[0].extra, state.round?.phase === "active" ? `of ${state.round.size.toLocaleString("en")}` : "");
    const word = state.round?.phase === "active" ? `${state.round.present} of ${state.round.size}` : state.phase;
    document.title = `${runId} · ${word} · Rallypoint`;
    announce(state.facts.join(" "));
  }

  function drawCommands(told) {
    show(more, told.length > 0);
    const text = JSON.stringify(told);
    if (commands.dataset.told === text) return;
    commands.dataset.told = text;
    commands.replaceChildren(...told.map(([what, line]) => {
      const code = h("code", {}, line);
      const button = h("button", { type: "button", class: "plain small", "aria-label": `Copy: ${what}`, onclick: () => copy(code, button) }, "Copy");
      return h("li", {}, h("span", { class: "faint" }, what), code, button);
    }));
  }

  /** For screen readers: the waiting reason when it changes, at most once in a few seconds. */
  function announce(text) {
    saying = text;
    clearTimeout(pending);
    const wait = Math.max(0, announced + SAID_MS - performance.now());
    pending = setTimeout(() => {
      announced = performance.now();
      say(byId("announce"), saying);
    }, wait);
  }

  function drawLines() {
    const kept = new Map();
    const now = store.now();
    const elements = [...store.lines].reverse().map((line) => {
      const found = lineRows.get(line) || h("li", { "data-level": line.level >= 30 ? "warning" : line.level >= 20 ? "info" : "debug" }, h("time", {}, moment(line.at, now) || "–"), sentence(line.text));
      kept.set(line, found);
      return found;
    });
    lineRows.clear();
    for (const [line, found] of kept) lineRows.set(line, found);
    arrange(list, elements);
  }

  function draw(message) {
    drawState();
    nodes.draw();
    timeline.update();
    if (message.rounds || message.full) rounds.draw();
    if (message.lines || message.full) drawLines();
    const exists = store.state !== null && store.state.phase !== "absent";
    show(rest, exists);
    show(group, exists);
  }

  const tick = setInterval(() => {
    if (document.visibilityState === "visible" && store.state !== null) {
      timeline.draw();
      nodes.draw();
    }
  }, 1000);

  return {
    element,
    trouble: () => (store.state?.trouble ? `${store.state.where} cannot be reached at present, what is shown was known before: ${store.state.trouble}` : ""),
    take(message) {
      store.apply(message);
      draw(message);
    },
    repaint: () => timeline.repaint(),
    close() {
      clearInterval(tick);
      clearTimeout(pending);
      timeline.close();
    },
  };
}

function sentence(text) {
  const element = h("span");
  sayWords(element, text);
  return element;
}

/** Copy a command; where the browser does not let a page copy (plain HTTP), it is selected. */
async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    say(button, "Copied");
  } catch {
    getSelection().selectAllChildren(code);
    say(button, "Selected");
  }
  setTimeout(() => say(button, "Copy"), SAID_MS);
}
