"use strict";
// Light or dark: what the reader has chosen here before, or what the system prefers.

const THEME = "zero-bubble-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;

/** Use the browser's storage, where it allows that; some refuse it, for example to a page from a folder. */
function stored(use) {
  try {
    return use(localStorage);
  } catch (error) {
    if (error.name !== "SecurityError") throw error;
    return null;
  }
}

function paintTheme() {
  const theme = chosen ?? (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme")?.setAttribute("aria-pressed", theme === "dark");
}

function switchTheme() {
  chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  stored((storage) => storage.setItem(THEME, chosen));
  paintTheme();
}

chosen = stored((storage) => storage.getItem(THEME));
paintTheme();  // in the head, so that the page is never shown in the other one
