// The page: login, the view that is shown, and the state of its feed.

import { logout, me } from "./api.js";
import { byId, say, show } from "./dom.js";
import { Feed } from "./feed.js";
import { listView } from "./runs.js";
import { loginView } from "./login.js";
import { runView } from "./run.js";

let viewer = null;
let view = null;
let feed = null;
let visit = 0;

function leave() {
  feed?.close();
  view?.close?.();
  feed = view = null;
  trouble("");
}

function trouble(text) {
  say(byId("trouble"), text);
  show(byId("trouble"), text !== "");
}

function freshness(state, seconds) {
  const words = { live: "Live", connecting: "Connecting", silent: "No contact" };
  byId("feed").dataset.state = state;
  say(byId("feed-text"), words[state]);
  if (state === "silent") trouble(`No word from the dashboard for ${Math.round(seconds)} s: what is shown here is old.`);
  else if (state === "live") trouble(view?.trouble() ?? "");
}

/** Whether this browser is still logged in; otherwise the page asks for the token. */
async function stillIn() {
  try {
    viewer = await me();
  } catch {
    return true; // no answer: try again
  }
  if (viewer.logged_in) return true;
  go();
  return false;
}

async function go() {
  leave();
  const mine = ++visit;
  try {
    viewer = await me();
  } catch (error) {
    if (mine !== visit) return;
    trouble(error.message);
    setTimeout(() => mine === visit && go(), 2000);
    return;
  }
  if (mine !== visit) return; // another view was opened meanwhile
  const main = byId("main");
  show(byId("logout"), viewer.logged_in && viewer.how === "session");
  say(byId("place"), viewer.where || "");
  show(byId("feed"), viewer.logged_in);
  if (!viewer.logged_in) {
    document.title = "Log in · Rallypoint";
    main.replaceChildren(loginView(go));
    main.querySelector("input")?.focus();
    return;
  }
  const run = viewer.only ?? new URLSearchParams(location.search).get("run");
  const made = run === null ? listView(open) : runView(run, viewer, open);
  view = made;
  main.replaceChildren(made.element);
  freshness("connecting", 0);
  const path = run === null ? "/api/runs" : `/api/run?id=${encodeURIComponent(run)}`;
  feed = new Feed(path, {
    onUpdate: (message) => {
      made.take(message);
      trouble(made.trouble());
    },
    onState: freshness,
    onRefused: stillIn,
  });
}

function open(path) {
  history.pushState(null, "", path);
  go();
  byId("main").focus();
  scrollTo(0, 0);
}

function themeNow() {
  const chosen = document.documentElement.dataset.theme;
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function nameTheme() {
  const other = themeNow() === "dark" ? "light" : "dark";
  byId("theme").textContent = other === "dark" ? "Dark" : "Light";
  byId("theme").setAttribute("aria-label", `Switch to the ${other} theme`);
  view?.repaint?.();
}

byId("theme").addEventListener("click", () => {
  const other = themeNow() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = other;
  try {
    localStorage.setItem("rallypoint-theme", other);
  } catch {
    // no storage: the choice holds for this page only
  }
  nameTheme();
});
byId("logout").addEventListener("click", async () => {
  try {
    await logout();
  } catch (error) {
    trouble(error.message);
  }
  go();
});
byId("home").addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  open("/");
});
addEventListener("popstate", go);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();
go();
