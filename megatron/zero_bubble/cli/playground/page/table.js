"use strict";
// One line per schedule: its length, its memory, its gap to the lower bound, and the command that prints them.

const percent = (rate) => `${(100 * rate).toFixed(2)} %`;
const UNEVEN = 1.005;  // from here on, the work of the ranks differs
const ms = (value) => value.toLocaleString("en", {minimumFractionDigits: 2, maximumFractionDigits: 2});

/** Create a cell that has its exact value in data-value, if it has one. */
function cell(name, text, value, className = "") {
  const made = element("td", {className: `${name} ${className}`, textContent: text});
  if (value !== undefined) made.dataset.value = value;
  return made;
}

function bubbleCell(name, rate, worst) {
  const made = cell(name, percent(rate), rate, "bubble");
  made.style.setProperty("--part", worst > 0 ? rate / worst : 0);
  return made;
}

/** The length in comparison with that of the pinned row, as a share of its time. */
function gainCell(length, pinned) {
  const gain = length / pinned - 1;
  if (!Number.isFinite(gain)) return element("td", {className: "gain", textContent: "–"});
  const text = `${gain < 0 ? "−" : gain > 0 ? "+" : ""}${(100 * Math.abs(gain)).toFixed(1)} %`;
  return element("td", {className: gain < 0 ? "gain shorter" : "gain", textContent: text});
}

/** The mean idle time, and how much more work than the mean the busiest rank has, where they differ. */
function idleCell({idle_rate_makespan: rate, imbalance}, worst) {
  const made = bubbleCell("idle", rate, worst);
  if (imbalance >= UNEVEN) made.append(element("small", {textContent: `×${imbalance.toFixed(2)}`}));
  return made;
}

/** The peak of the fullest rank in units of p microbatches, and one bar per rank; the line is the limit. */
function memoryCell({peak_activation: peaks, num_ranks: p, memory_limit_microbatches: limit}, most, gib) {
  const inP = `${Number((Math.max(...peaks) / p).toFixed(3))} p`;
  const made = cell("memory", gib ? `${gib.activations.toFixed(1)} GiB` : inP, Math.max(...peaks) / p);
  const total = gib?.total ? `${gib.total.toFixed(1)} GiB with weights, gradients and optimizer; ` : "";
  made.title = `${gib ? `${inP}; ${total}` : ""}peak microbatches by rank: ${peaks.map((peak) => Number(peak.toFixed(3))).join(" ")}`;
  const scale = Math.min(most, 2 * limit);  // a schedule far over the limit must not flatten the other bars
  const bars = peaks.map((peak) => {
    const bar = element("i", {className: peak > limit * (1 + 1e-9) ? "over" : ""});
    bar.style.height = `${100 * peak / scale}%`;
    return bar;
  });
  const chart = element("span", {className: peaks.length > 16 ? "bars" : "bars few"}, ...bars);
  chart.style.setProperty("--limit", `${Math.min(200, 100 * limit / scale)}%`);
  made.append(chart);
  return made;
}

/** The table's line for an answer. `worst` has the largest bubble and idle rates and the largest peak in the table, and
 *  the pinned row with its length. */
function answerLine({id, summary}, {plan, limit, command, run, memory_gib: gib}, worst) {
  const isPinned = id === worst.pinned;
  const line = element("tr", {className: [limit.kept ? "" : "over", isPinned ? "pinned" : ""].join(" ").trim()});
  const link = element("a", {textContent: id, href: `#picture-${id.replaceAll(" ", "-")}`, title: summary});
  link.addEventListener("click", (event) => {
    event.preventDefault();  // the part after the # stores the setting
    document.querySelector(link.getAttribute("href").replace(/#(.*)/, (_, name) => `#${CSS.escape(name)}`))
      .scrollIntoView({behavior: "smooth", block: "start"});
  });
  const name = element("th", {scope: "row"}, link);
  if (plan.num_slices) name.append(element("small", {className: "slices", textContent: `${plan.num_slices} slices`}));
  if (!limit.kept) name.append(element("small", {className: "limit", textContent: "over limit"}));
  line.append(name, gainCell(plan[`${worst.objective}_ms`], worst.length),
    cell("span", ms(plan.span_ms), plan.span_ms), bubbleCell("span", plan.bubble_rate_span, worst.span),
    cell("makespan", ms(plan.makespan_ms), plan.makespan_ms),
    bubbleCell("makespan", plan.bubble_rate_makespan, worst.makespan),
    idleCell(plan, worst.idle),
    memoryCell(plan, worst.peak, gib),
    cell("bound", plan.lower_bound_ms === undefined ? "–" : ms(plan.lower_bound_ms), plan.lower_bound_ms),
    limit.kept && plan.gap !== undefined ? cell("gap", percent(plan.gap), plan.gap) : cell("gap", "–", plan.gap),
    element("td", {}, copyButton(id, command ?? run), pinButton(id, isPinned)));
  line.querySelector(".bound").title = plan.lower_bound_reason ?? "only for equal microbatches";
  return line;
}

function pendingLine({id, summary}, text) {
  const name = element("th", {scope: "row", textContent: id, title: summary});
  return element("tr", {className: "pending"}, name, element("td", {colSpan: 10, textContent: text}));
}

function pinButton(id, isPinned) {
  const button = element("button", {type: "button", className: "copy pin", textContent: isPinned ? "pinned" : "pin",
    title: "keep this row on top, and compare the others with it"});
  button.setAttribute("aria-pressed", isPinned);
  button.addEventListener("click", () => pin(id));
  return button;
}

function copyButton(id, command) {
  const button = element("button", {type: "button", className: "copy", textContent: "copy", title: command});
  button.setAttribute("aria-label", `copy the command for ${id}`);
  button.addEventListener("click", async () => {
    await copy(command);
    for (const other of document.querySelectorAll("tbody .copy:not(.pin)")) other.textContent = other === button ? "copied" : "copy";
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", {value: text});  // some pages, for example from a file, have no clipboard
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Replace the children of `parent`; children that stay in place keep the focus. */
function place(parent, children) {
  children.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
  while (parent.children.length > children.length) parent.lastChild.remove();
}
