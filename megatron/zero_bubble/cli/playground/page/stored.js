"use strict";
// A page without a server: its settings are precomputed, and packed in the page.

const GRID = CATALOGUE.grid ?? null;  // what can be chosen; null with a server
const stored = {rows: [], answers: new Map()};

/** Build a choice for every dimension of the grid, in place of the other controls. */
function buildGrid() {
  if (!GRID) return;
  document.body.classList.add("stored");
  const titles = {costs: "Costs", ranks: "Ranks p", multiple: "Microbatches"};
  for (const [name, values] of Object.entries(GRID)) {
    const radios = Object.entries(values).map(([value, label]) =>
      element("label", {}, element("input", {type: "radio", name, value}), ` ${label}`));
    document.getElementById("grid").append(
      element("fieldset", {}, element("legend", {textContent: titles[name]}), ...radios));
  }
}

/** Unpack the answers of a setting. */
async function unpack({costs, ranks, multiple}) {
  const key = `${costs} ${ranks} ${multiple}`;
  const packed = Uint8Array.from(atob(CATALOGUE.cases[key] ?? ""), (letter) => letter.charCodeAt(0));
  const text = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const rows = await new Response(text).json();
  for (const row of rows) stored.answers.set(`${key} ${row.id}`, row);
  stored.rows = rows.map(({id, summary}) => ({id, summary, why: "", query: `${key} ${id}`}));
}
