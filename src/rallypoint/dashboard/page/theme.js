// Runs before anything is drawn: sets the theme that was chosen on this page. Without a choice the system's holds.
"use strict";
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("rallypoint-theme");
  } catch {
    // no storage: the system's theme
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
