// Before anything is painted: the theme that was chosen here, if one was. Otherwise the system's.
"use strict";
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("rallypoint-theme");
  } catch {
    // no storage: the system's
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
