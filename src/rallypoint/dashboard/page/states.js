// What nodes are, in words and colours. The colours themselves are in style.css, one for light and one for dark.

/** States of the time line, in the order in which they are painted: the last one wins where there is no room for all. */
export const STATES = ["out", "left", "member", "forming", "joining", "spare", "waiting", "drained", "held back", "gone", "lost"];

export const MEANING = {
  member: "in the round",
  forming: "has a place in the round that forms",
  joining: "wants in, no round yet",
  waiting: "would be admitted if the members re-joined",
  spare: "wants in, the round is full",
  "held back": "was lost too often, has to wait",
  drained: "was asked to go",
  lost: "its session ended without a word",
  gone: "went, and nobody here saw how",
  left: "said goodbye",
};

/** Those that somebody has to look at. */
export const GRAVE = new Set(["lost", "gone", "held back"]);

/** The state that a node's standing is shown as; of one that went, the time line knows how. */
export const shownAs = (standing, track) =>
  standing === "gone" ? track?.spans[track.spans.length - 1][1] || "gone" : standing.startsWith("confirm") ? "forming" : standing;

export const variable = (state) => `--s-${state.replace(" ", "-")}`;

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  const colours = Object.fromEntries(STATES.map((state) => [state, state === "out" ? "transparent" : read(variable(state))]));
  return { ...colours, member2: read("--s-member2"), text: read("--text"), faint: read("--faint"), line: read("--line"), card: read("--card"), accent: read("--accent") };
}
