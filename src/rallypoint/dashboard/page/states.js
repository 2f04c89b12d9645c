// The states of nodes, their meaning and colours. The colours are in style.css, for light and dark.

/** In drawing order: where there is no room for all, the last one wins. */
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

/** States that need attention. */
export const GRAVE = new Set(["lost", "gone", "held back"]);

/** The state that stands for a node's standing. How a gone node went is in its track. */
export const shownAs = (standing, track) =>
  standing === "gone" ? track?.spans[track.spans.length - 1][1] || "gone" : standing.startsWith("confirm") ? "forming" : standing;

export const variable = (state) => `--s-${state.replace(" ", "-")}`;

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  const colours = Object.fromEntries(STATES.map((state) => [state, state === "out" ? "transparent" : read(variable(state))]));
  return { ...colours, member2: read("--s-member2"), text: read("--text"), faint: read("--faint"), line: read("--line"), card: read("--card"), accent: read("--accent") };
}
