"use strict";
// When the setting changes, the page asks for the figures of one schedule after the other: first for those that need no
// search. A drawing is asked for when it comes into view (picture.js).

const PAUSE_MS = 120;  // shortest time between questions while a slider is dragged
const PATIENCE_MS = 700;  // how long the page shows the previous setting before it shows partial answers
const MOST_AHEAD = 16;  // ranks of a drawing that comes before the table
const PLAIN = "1f1b";  // the row that is pinned without a job
const pictures = new Map();
const lines = new Map();
let drawn = [];
let shown = {setting: null, rows: [], answers: new Map(), refusals: new Map()};
let leave = new AbortController();
let timer = 0;

/** Ask for one row and store the answer in `next`; return false if the setting has changed meanwhile. */
async function askRow(row, next, signal) {
  try {
    next.answers.set(row.id, await ask(row.query, signal));
  } catch (error) {
    if (!signal.aborted) next.refusals.set(row.id, error.message);
  }
  return !signal.aborted;
}

async function update() {
  leave.abort();
  leave = new AbortController();
  const {signal} = leave;
  const setting = readSetting();
  const next = {setting, rows: rowsOf(setting), answers: new Map(), refusals: new Map()};
  const wanted = next.rows.filter(({why}) => !why);
  for (const {id, why} of next.rows) if (why) next.refusals.set(id, why);
  if (shown.setting) document.body.classList.add("busy");
  else show(next);
  say("loading the planner…");
  await source.ready.catch(() => {});
  if (signal.aborted) return;
  const started = performance.now();
  // The widest search runs first, because users wait for it most.
  const order = [...wanted.filter(({searched}) => !searched), ...wanted.filter(({searched}) => searched).reverse()];
  for (const [number, row] of order.entries()) {
    say(`${row.searched ? "searching" : "planning"} ${row.id} (${number + 1} of ${order.length})…`);
    if (!(await askRow(row, next, signal))) return;
    if (order[number + 1]?.searched || performance.now() - started > PATIENCE_MS) show(next);
  }
  show(next);
  say(`${next.answers.size} schedules planned.`);
  document.body.dataset.settled = hashOf(setting);
}

function show(next) {
  shown = next;
  document.body.classList.remove("busy");
  paint();
}

function say(text) {
  document.getElementById("status").textContent = text;
}

/** Paint the table, the list of missing schedules and the drawings, from the answers so far. */
function paint() {
  const {setting, rows, answers, refusals} = shown;
  const {objective} = setting;
  const length = ({id}) => answers.get(id).plan[`${objective}_ms`];
  const over = ({id}) => Number(!answers.get(id).limit.kept);
  const sorted = rows.filter(({id}) => answers.has(id)).sort((a, b) => over(a) - over(b) || length(a) - length(b));
  const pinned = sorted.find(({id}) => id === (setting.pin || OWN_ROW || PLAIN));
  const known = pinned ? [pinned, ...sorted.filter((row) => row !== pinned)] : sorted;
  const pending = rows.filter(({id}) => !answers.has(id) && !refusals.has(id));
  document.getElementById("results").dataset.objective = objective;
  paintTable(known, pending, answers, {objective, pinned: pinned?.id, length: pinned && length(pinned)});
  paintAbsent(known, shown);
  paintBest(sorted, pinned, pending, shown);
  paintLegend(setting);
  paintPictures(known, answers);
}

function paintTable(known, pending, answers, reference) {
  const plans = known.map(({id}) => answers.get(id).plan);
  const worst = {
    ...reference,
    span: Math.max(...plans.map((plan) => plan.bubble_rate_span)),
    makespan: Math.max(...plans.map((plan) => plan.bubble_rate_makespan)),
    idle: Math.max(...plans.map((plan) => plan.idle_rate_makespan)),
    peak: Math.max(...plans.flatMap((plan) => plan.peak_activation)),
  };
  const made = known.map((row) => {
    const answer = answers.get(row.id), basis = JSON.stringify(worst), old = lines.get(row.id);
    if (old?.answer === answer && old.basis === basis) return old.line;
    const line = answerLine(row, answer, worst);
    lines.set(row.id, {answer, basis, line});
    return line;
  });
  place(document.querySelector("tbody"), [...made, ...pending.map((row) => pendingLine(row, row.searched ? "searching…" : "planning…"))]);
}

/** List why schedules are missing or over the limit; schedules with the same reason share a line. */
function paintAbsent(known, {rows, answers, refusals}) {
  const reasons = new Map();
  for (const {id} of rows.filter((row) => refusals.has(row.id))) {
    const why = refusals.get(id);
    reasons.set(why, [...(reasons.get(why) ?? []), id]);
  }
  const items = [...reasons].map(([why, ids]) => reason(ids.join(", "), why));
  for (const {id} of known) {
    const {kept, sentence} = answers.get(id).limit;
    if (!kept) items.push(reason(id, sentence));
  }
  document.getElementById("absent").replaceChildren(...items);
}

function reason(names, sentence) {
  return element("li", {}, element("b", {textContent: names}), `: ${sentence}`);
}

/** Store the setting in the address, where the browser allows that; some refuse it to a page from a file. */
function keepInAddress(setting) {
  document.getElementById("link").textContent = "copy link";
  try {
    history.replaceState(null, "", hashOf(setting));
  } catch (error) {
    if (error.name !== "SecurityError") throw error;
  }
}

async function copyLink() {
  await copy(location.href.replace(/#.*/, "") + hashOf(readSetting()));
  document.getElementById("link").textContent = "copied";
}

/** Say where the page plans, and where it belongs. */
function describePage({has_server, home}) {
  document.body.classList.toggle("served", has_server);
  const link = document.getElementById("home");
  link.hidden = !home;
  if (home) link.href = home;
}

/** Keep a row on top, and compare the others with it. */
function pin(id) {
  const isSettled = document.body.dataset.settled === hashOf(readSetting());
  form.elements.pin.value = id;
  const setting = readSetting();
  keepInAddress(setting);
  shown.setting = {...shown.setting, pin: id};
  if (isSettled) document.body.dataset.settled = hashOf(setting);
  paint();
}

function paintBest(sorted, pinned, pending, {answers, setting: {objective}}) {
  const best = sorted.find(({id}) => answers.get(id).limit.kept);
  const text = (plan) => `${ms(plan[`${objective}_ms`])} ms, mean idle ${percent(plan[`idle_rate_${objective}`])}`;
  const parts = best ? ["Shortest within the limit: ", element("b", {textContent: best.id}),
    `, ${text(answers.get(best.id).plan)} of the ${objective}`] : [`No schedule ${pending.length ? "has been found yet" : "is within the limit"}`];
  if (best && pinned && best !== pinned) {
    const lengths = [best, pinned].map(({id}) => answers.get(id).plan[`${objective}_ms`]);
    parts.push(` (${pinned.id}: ${text(answers.get(pinned.id).plan)}): `,
      element("b", {textContent: gainCell(...lengths).textContent}), " of the time");
  }
  const {imbalance} = answers.get((pinned ?? best)?.id)?.plan ?? {};
  const uneven = document.getElementById("imbalance");
  uneven.hidden = !(imbalance >= UNEVEN);
  uneven.textContent = `The busiest rank of ${(pinned ?? best)?.id} has ${imbalance?.toFixed(2)} times the mean work: no order `
    + "of passes removes that part of the idle time; balance the layers, or divide the vocabulary.";
  document.getElementById("best").replaceChildren(...parts, ".");
}

function paintPictures(known, answers) {
  drawn = known.map((row) => {
    const answer = answers.get(row.id);
    const picture = pictures.get(row.id) ?? new Picture(row.id);
    pictures.set(row.id, picture);
    if (picture.answer !== answer) picture.set(answer, row);
    const {plan, limit} = answer;
    const slices = plan.num_slices ? `${plan.num_slices} slices, ` : "";
    const vocabulary = plan.vocabulary ? `vocabulary parallelism ${plan.vocabulary}, ` : "";
    const moved = plan.offload ? `${percent(plan.offloaded_share)} of the forwards move, ` : "";
    const rates = `${slices}${vocabulary}${moved}bubble ${percent(plan.bubble_rate_span)} of span, ${percent(plan.bubble_rate_makespan)} of makespan, mean idle ${percent(plan.idle_rate_makespan)}`
      + (plan.imbalance >= UNEVEN ? `, busiest rank ${plan.imbalance.toFixed(2)} times the mean work` : "");
    picture.figures.textContent = limit.kept ? rates : `${rates}; over the memory limit`;
    picture.figures.title = answer.lengths ?? "";
    picture.element.classList.toggle("over", !limit.kept);
    return picture;
  });
  // The pinned schedule and the best one come before the table, where they leave room for it.
  const ahead = known.filter(({id}, at) => at < 2 && answers.get(id).plan.num_ranks <= MOST_AHEAD).length;
  const elements = drawn.map((picture) => picture.element);
  place(document.getElementById("first"), elements.slice(0, ahead));
  place(document.getElementById("pictures"), elements.slice(ahead));
  draw();
}

function draw() {
  view.longest = Math.max(0, ...drawn.map(({answer}) => answer.plan.makespan_ms));
  for (const picture of drawn) picture.draw();
}

function changed() {
  const setting = readSetting();
  moveSliders(setting);
  keepInAddress(setting);
  clearTimeout(timer);
  timer = setTimeout(update, PAUSE_MS);
}

/** On a phone, the controls are closed, so that the first result is in view. */
function collapse(narrow) {
  const controls = document.getElementById("controls");
  controls.open = !narrow.matches;
  narrow.addEventListener("change", () => { controls.open = !narrow.matches; });
}

function paintLegend(setting) {
  const kinds = CATALOGUE.kinds.filter(({shard}) => !shard || isDivided(setting));
  const entries = kinds.map(({colour, meaning}) => {
    const patch = element("i");
    patch.style.background = colour;
    return element("span", {}, patch, meaning);
  });
  entries.push(element("span", {}, element("i", {className: "lighter"}), "lighter: the rank's later stages"));
  entries.push(element("span", {}, element("i", {className: "idle"}), "idle"));
  if (isOffloaded(setting)) {
    const patch = element("i");
    patch.style.background = CATALOGUE.lane;
    entries.push(element("span", {}, patch, "copy to host memory, or back"));
  }
  document.getElementById("legend").replaceChildren(...entries);
}

buildControls(changed);
paintTheme();
describePage(CATALOGUE);
describeJob();
collapse(matchMedia("(max-width: 760px)"));
paintLegend(settingOfHash());
addEventListener("hashchange", () => { writeSetting(settingOfHash()); update(); });
addEventListener("resize", () => requestAnimationFrame(draw));
system.addEventListener("change", () => { paintTheme(); draw(); });
document.getElementById("theme").addEventListener("click", () => { switchTheme(); draw(); });
document.getElementById("link").addEventListener("click", copyLink);
writeSetting(settingOfHash());
update();
