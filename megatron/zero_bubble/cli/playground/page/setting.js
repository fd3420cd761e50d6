"use strict";
// The setting: the values of the controls, stored in the address bar after the #, and the questions to ask for it.

const {most} = CATALOGUE;
const CONTROLS = [
  {key: "p", flag: "num-ranks", label: "ranks p", start: "4", min: 2, max: most["num-ranks"]},
  {key: "m", flag: "num-microbatches", label: "microbatches m", start: "8", min: 1, max: most["num-microbatches"]},
  {key: "F", flag: "forward-ms", label: "F forward", unit: "ms", start: "10", min: 0.5, max: 40, step: 0.5},
  {key: "B", flag: "backward-ms", label: "B input gradient", unit: "ms", start: "10", min: 0.5, max: 40, step: 0.5},
  {key: "W", flag: "wgrad-ms", label: "W weight gradient", unit: "ms", start: "10", min: 0, max: 40, step: 0.5},
  {key: "comm", flag: "comm-ms", label: "communication", unit: "ms", start: "0.5", min: 0, max: 10, step: 0.1},
  {key: "message", flag: "message-ms", label: "message", hint: "taken from the passes of sender and receiver", unit: "ms",
    start: "0", min: 0, max: 5, step: 0.1},
  {key: "limit", flag: "memory-limit", label: "memory limit", hint: "1 p is the peak of 1F1B; empty for no limit",
    unit: "p", start: "1", min: 0.3, max: 2.05, step: 0.05},
  {key: "v", flag: "num-chunks", label: "stages per rank v", hint: "for interleaved schedules, loops and waves", start: "2", min: 2,
    max: most["num-chunks"]},
  {key: "a", flag: "attention-share", label: "attention in F",
    hint: "share of F, only for slices, of which later ones have more, and for lengths", start: "0", min: 0, max: 1, step: 0.05},
  {key: "S", flag: "output-ms", label: "S output layer", hint: "forward of a rank's shard of the output layer",
    unit: "ms", start: "2.5", min: 0, max: 20, step: 0.5, shard: true},
  {key: "T", flag: "output-wgrad-ms", label: "T its gradient", hint: "of the weights of a rank's shard", unit: "ms",
    start: "2.5", min: 0, max: 20, step: 0.5, shard: true},
  {key: "H", flag: "host-ms", label: "copy to the host", hint: "of the activations of a microbatch on one rank, or back",
    unit: "ms", start: "10", min: 0.5, max: 60, step: 0.5, copy: true},
];
const JOB = CATALOGUE.job;  // what the page starts from, in place of the sliders for costs; null without a job
const OF_JOB = new Set(JOB ? ["p", "F", "B", "W", "comm", "message", "a", "S", "T"] : []);
const OWN_ROW = JOB?.own ? `your job (${JOB.own})` : null;
if (JOB) CONTROLS.find(({key}) => key === "m").start = String(Math.min(JOB.num_microbatches, most["num-microbatches"]));
if (JOB?.limit_gib) {
  Object.assign(CONTROLS.find(({key}) => key === "limit"), {start: String(JOB.limit_gib), unit: "GiB",
    hint: "for activations; empty for no limit",
    min: Math.round(JOB.limit_gib / 10), max: Math.round(1.5 * JOB.limit_gib) || 1, step: 0.5});
}
const CHOICES = {placement: "any", objective: "makespan", slices: "1", vocabulary: "off", offload: "none", pairs: "off", lengths: "", pin: ""};
const form = document.getElementById("setting");

/** The form's values, as the text that was typed, so that the command has the same text. */
function readSetting() {
  return Object.fromEntries(new FormData(form).entries());
}

/** The setting in the address after the #; missing values have their defaults. */
function settingOfHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  const starts = {...CHOICES, ...Object.fromEntries(CONTROLS.map(({key, start}) => [key, start]))};
  return Object.fromEntries(Object.entries(starts).map(([key, start]) => [key, given.get(key) ?? start]));
}

function hashOf(setting) {
  return "#" + new URLSearchParams(setting);
}

/** Build a slider and a number field for every control; both call `changed` on input. */
function buildControls(changed) {
  for (const {key, label, hint, unit, min, max, step = 1} of CONTROLS) {
    const row = element("div", {className: "control"});
    const number = element("input", {type: "number", id: `number-${key}`, name: key, min: 0, step: "any"});
    const slider = element("input", {type: "range", id: `slider-${key}`, min, max, step});
    slider.setAttribute("aria-label", label);
    if (key === "limit") number.placeholder = "none";
    slider.addEventListener("input", () => {
      // The slider's last position means no limit.
      number.value = key === "limit" && Number(slider.value) > max - step / 2 ? "" : slider.value;
      changed();
    });
    number.addEventListener("input", changed);
    const text = element("label", {htmlFor: number.id, textContent: label, title: hint ?? ""});
    row.append(text, number, element("span", {className: "unit", textContent: unit ?? ""}), slider);
    document.getElementById("sliders").append(row);
  }
  for (const name of ["slices", "vocabulary", "offload"]) {
    for (const value of CATALOGUE[name]) {
      const radio = element("input", {type: "radio", name, value});
      document.getElementById(name).append(element("label", {}, radio, ` ${value}`));
    }
  }
  form.elements.lengths.addEventListener("input", changed);
  form.addEventListener("change", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
}

/** Say which figures come from the job, for which there are no sliders. */
function describeJob() {
  if (!JOB) return;
  const range = (values) => [...new Set([Math.min(...values), Math.max(...values)].map((value) =>
    Number(value.toPrecision(3))))].join(" to ");
  const {forward_ms: F, backward_ms: B, wgrad_ms: W} = JOB.times;
  const lines = [`${JOB.num_ranks} ranks, ${JOB.num_microbatches} microbatches`,
    ...Object.entries({F, B, W}).map(([kind, times]) => `${kind} ${range(times)} ms per rank`),
    `transfers ${range(JOB.comm_ms)} ms`];
  if (JOB.activation_gib) lines.push(`activations ${range(JOB.activation_gib)} GiB per microbatch and rank`);
  const list = (texts) => element("ul", {}, ...texts.map((textContent) => element("li", {textContent})));
  const notes = element("details", {}, element("summary", {textContent: "what these are"}), list(JOB.notes));
  const section = document.getElementById("job");
  section.append(element("p", {}, "From your job: ", element("b", {textContent: JOB.source})), list(lines));
  if (JOB.notes.length) section.append(notes);
  section.hidden = false;
}

function writeSetting(setting) {
  for (const {key} of CONTROLS) form.elements[key].value = setting[key];
  for (const key of Object.keys(CHOICES)) form.elements[key].value = setting[key];
  moveSliders(setting);
}

/** Whether the output layer and the embedding are divided over all ranks. */
const isDivided = ({vocabulary}) => vocabulary !== CHOICES.vocabulary;

/** Whether activations move to host memory. */
const isOffloaded = ({offload = CHOICES.offload}) => offload !== CHOICES.offload;

/** Whether a control applies to the setting; the lengths say how many microbatches there are. */
const applies = ({key, shard, copy}, setting) =>
  !OF_JOB.has(key) && (!shard || isDivided(setting)) && (!copy || isOffloaded(setting)) && (key !== "m" || !setting.lengths);

/** Set the sliders to the numbers, and show those that apply. */
function moveSliders(setting) {
  for (const control of CONTROLS) {
    const {key, max} = control;
    const slider = document.getElementById(`slider-${key}`);
    slider.parentElement.hidden = !applies(control, setting);
    slider.value = setting[key] === "" ? max : setting[key];
    const part = (slider.value - slider.min) / (slider.max - slider.min || 1);
    slider.style.setProperty("--part", `${100 * part}%`);
  }
}

/** One row per schedule: its query and whether that needs a search, or the reason why it is not asked for. */
function rowsOf(setting) {
  const rows = [];
  if (OWN_ROW) {
    const plain = {...setting, vocabulary: CHOICES.vocabulary, offload: CHOICES.offload};
    rows.push({id: OWN_ROW, summary: "the schedule that the job has by its flags", why: "",
      query: queryOf({schedule: CATALOGUE.own}, plain)});
  }
  const cut = (id) => `${id} n${setting.slices === "auto" ? " auto" : setting.slices}`;
  for (const {name, shape, adapts, sliced, summary, has_pairs} of CATALOGUE.schedules) {
    const own = sliced ? {schedule: name, "num-slices": setting.slices} : {schedule: name};
    if (adapts) own["equal-passes"] = "";
    if (shape === "interleaved") own["num-chunks"] = setting.v;
    const elsewhere = setting.placement !== "any" && setting.placement !== (shape === "interleaved" ? "loop" : shape);
    const whole = sliced && setting.slices === "1";
    const why = sliced && setting.lengths ? "cuts sequences, which must be equally long"
      : sliced && isDivided(setting) ? "cuts sequences, which vocabulary parallelism does not support"
      : whole ? "cuts sequences; select 2 or more slices per sequence"
      : elsewhere ? `has ${WHERE[shape]}, but the selected placement is ${setting.placement}` : "";
    const plain = shape === "interleaved" ? `${name} x${setting.v}` : name;
    const id = sliced && !whole ? cut(plain) : plain;
    if (id !== JOB?.same) rows.push({id, summary, why, query: queryOf(own, setting)});
    if (has_pairs && setting.pairs === "on") {
      const alone = isDivided(setting) ? "vocabulary parallelism" : isOffloaded(setting) ? "offloading"
        : setting.lengths ? "different lengths" : "";
      rows.push({id: `${id} with pairs`, why: why || (alone && `runs pairs, which exclude ${alone}`),
        summary: `${summary}; forwards run together with backwards, for experts`,
        query: queryOf({...own, pairs: ""}, setting)});
    }
    if (adapts) {
      const {"equal-passes": _, ...fitted} = own;
      const query = queryOf(fitted, setting);
      rows.push({id: `${name} fitted`, summary: `${summary}; refitted to these costs`, why, query, searched: true});
    }
  }
  const own = {schedule: CATALOGUE.auto, placement: setting.placement === "any" ? "auto" : setting.placement};
  const hasChunks = ["loop", "wave"].includes(setting.placement);
  if (hasChunks) own["num-chunks"] = setting.v;
  const found = hasChunks ? `${CATALOGUE.auto} ${setting.placement} x${setting.v}` : CATALOGUE.auto;
  const summary = "the shortest schedule found for these costs within the memory limit";
  rows.push({id: found, summary, why: "", query: queryOf(own, setting), searched: true});
  if (setting.slices !== "1" && !isDivided(setting) && !setting.lengths) {
    const query = queryOf({...own, "num-slices": setting.slices}, setting);
    rows.push({id: cut(found), summary: `${summary}, of slices`, why: "", query, searched: true});
  }
  return rows;
}

const WHERE = {linear: "one stage per rank", vee: "two stages per rank in a V", interleaved: "interleaved stages",
  wave: "several stages per rank in a wave"};

/** The flags of one command. Without a limit, it uses one that no schedule reaches, so that there is always a bound. */
function queryOf(own, setting) {
  const query = new URLSearchParams(own);
  const count = setting.lengths ? setting.lengths.split(",").length : setting.m;
  for (const control of CONTROLS) {
    const {key, flag} = control;
    if (!applies(control, setting)) continue;
    if (key === "v" || (key === "a" && (!(own["num-slices"] || setting.lengths) || setting.a === "0"))) continue;
    if (key === "message" && setting.message === "0") continue;
    if (key === "limit") query.set(flag, setting.limit ? `${setting.limit}${control.unit}` : `${count}p`);
    else if ((setting[key] ?? "") !== "") query.set(flag, setting[key]);
  }
  for (const key of ["objective", "vocabulary", "offload", "lengths"]) {
    if ((setting[key] ?? CHOICES[key]) !== CHOICES[key]) query.set(key, setting[key]);
  }
  return String(query);
}

/** Create an element with properties and children. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
