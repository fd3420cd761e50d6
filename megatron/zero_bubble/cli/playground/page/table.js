"use strict";
// One line per schedule: its length, its memory, its gap to the lower bound, and the command that prints them.

const percent = (rate) => `${(100 * rate).toFixed(2)} %`;
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

/** The peak of the fullest rank in units of p microbatches, and one bar per rank; the line is the limit. */
function memoryCell({peak_activation: peaks, num_ranks: p, memory_limit_microbatches: limit}, most) {
  const made = cell("memory", `${Number((Math.max(...peaks) / p).toFixed(3))} p`, Math.max(...peaks) / p);
  made.title = `peak microbatches by rank: ${peaks.map((peak) => Number(peak.toFixed(3))).join(" ")}`;
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

/** The table's line for an answer. `worst` has the largest bubble and idle rates and the largest peak in the table. */
function answerLine({id, summary}, {plan, limit, command}, worst) {
  const line = element("tr", {className: limit.kept ? "" : "over"});
  const link = element("a", {textContent: id, href: `#picture-${id.replaceAll(" ", "-")}`, title: summary});
  link.addEventListener("click", (event) => {
    event.preventDefault();  // the part after the # stores the setting
    document.querySelector(link.getAttribute("href").replace(/#(.*)/, (_, name) => `#${CSS.escape(name)}`))
      .scrollIntoView({behavior: "smooth", block: "start"});
  });
  const name = element("th", {scope: "row"}, link);
  if (plan.num_slices) name.append(element("small", {className: "slices", textContent: `${plan.num_slices} slices`}));
  if (!limit.kept) name.append(element("small", {textContent: "over limit"}));
  line.append(name,
    cell("span", ms(plan.span_ms), plan.span_ms), bubbleCell("span", plan.bubble_rate_span, worst.span),
    cell("makespan", ms(plan.makespan_ms), plan.makespan_ms),
    bubbleCell("makespan", plan.bubble_rate_makespan, worst.makespan),
    bubbleCell("idle", plan.idle_rate_makespan, worst.idle),
    memoryCell(plan, worst.peak),
    cell("bound", plan.lower_bound_ms === undefined ? "–" : ms(plan.lower_bound_ms), plan.lower_bound_ms),
    limit.kept && plan.gap !== undefined ? cell("gap", percent(plan.gap), plan.gap) : cell("gap", "–", plan.gap),
    element("td", {}, copyButton(id, command)));
  line.querySelector(".bound").title = plan.lower_bound_reason ?? "only for equal microbatches";
  return line;
}

function pendingLine({id, summary}, text) {
  const name = element("th", {scope: "row", textContent: id, title: summary});
  return element("tr", {className: "pending"}, name, element("td", {colSpan: 9, textContent: text}));
}

function copyButton(id, command) {
  const button = element("button", {type: "button", className: "copy", textContent: "copy", title: command});
  button.setAttribute("aria-label", `copy the command for ${id}`);
  button.addEventListener("click", async () => {
    await copy(command);
    for (const other of document.querySelectorAll(".copy")) other.textContent = other === button ? "copied" : "copy";
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
