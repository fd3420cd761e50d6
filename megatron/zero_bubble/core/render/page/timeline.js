// Draws the planned passes above the measured ones, and the memory of every rank below, on one time scale.
// The wheel zooms around the pointer, dragging moves the view, and a double click shows everything.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline");
const tip = document.getElementById("tip");
const context = canvas.getContext("2d");

const LEFT = 64, RIGHT = 8, TITLE = 26, AXIS = 22, GAP = 3;
const ranks = data.planned.length;
const ROW = ranks <= 16 ? 22 : 14;
const CURVE = ranks <= 16 ? 34 : 20;
const LANE = 7;  // height of a lane, such as that of copies, below the passes of its rank
const LANES = data.lanes ? LANE * data.lanes.names.length : 0;
const [STAGE, KIND, MICROBATCH, START, END, WAITS_FOR, AWAITED, ARRIVED, SLOW, LATE, HOST] = [...Array(11).keys()];
const WORDS = { F: "forward", B: "input gradient", W: "weight gradient", BW: "fused backward", R: "forward again" };

const panels = [
  { name: "planned", title: data.titles.planned, rows: data.planned, row: ROW, below: LANES },
  { name: "measured", title: data.titles.measured, rows: data.measured, row: ROW, below: LANES },
];
if (data.kept) panels.push({ name: "kept", title: data.titles.kept, rows: data.kept.measured, row: CURVE, below: 0 });
let bottom = 0;
for (const panel of panels) {
  panel.top = bottom + TITLE;
  bottom = panel.top + ranks * pitch(panel) + 6;
}
const HEIGHT = bottom + AXIS;

// The position of every pass in both panels.
const places = new Map();
for (const panel of panels.slice(0, 2)) {
  panel.rows.forEach((row, rank) => row.forEach((pass, index) => {
    const name = label(pass);
    if (!places.has(name)) places.set(name, { rank });
    places.get(name)[panel.name] = pass;
    if (panel.name === "measured") places.get(name).before = row[index - 1];
  }));
}

const whole = [0, data.longest];
let view = [...whole];
let hovered = null;
let width = 0;

function label(pass) {
  return `${pass[STAGE]}${pass[KIND]}${pass[MICROBATCH]}`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function x(ms) {
  return LEFT + ((ms - view[0]) / (view[1] - view[0])) * (width - LEFT - RIGHT);
}

function ms(at) {
  return view[0] + ((at - LEFT) / (width - LEFT - RIGHT)) * (view[1] - view[0]);
}

function pitch(panel) {
  return panel.row + panel.below + GAP;
}

function y(panel, rank) {
  return panel.top + rank * pitch(panel);
}

// The range of passes that the view shows; the passes of a row are in order of time.
function shown(row) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle][END] < view[0]) low = middle + 1; else high = middle;
  }
  let end = low;
  while (end < row.length && row[end][START] <= view[1]) end++;
  return [low, end];
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(HEIGHT * ratio);
  canvas.style.height = `${HEIGHT}px`;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, HEIGHT);
  const ink = { ink: colour("ink"), soft: colour("soft"), line: colour("line"), idle: colour("idle"),
    late: colour("late"), host: colour("host"), mark: colour("mark") };
  for (const panel of panels) drawFrame(panel, ink);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT - RIGHT, HEIGHT);
  context.clip();
  drawPasses(panels[0], ink);
  drawPasses(panels[1], ink);
  if (data.lanes) for (const panel of panels.slice(0, 2)) drawLanes(panel, ink);
  if (panels[2]) drawKept(panels[2], ink);
  if (hovered) drawHovered(ink);
  context.restore();
  drawAxis(ink);
}

function drawFrame(panel, ink) {
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.font = "600 13px system-ui, sans-serif";
  context.fillStyle = ink.ink;
  context.fillText(panel.title, LEFT, panel.top - 8);
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "right";
  for (let rank = 0; rank < ranks; rank++) {
    const top = y(panel, rank);
    context.fillStyle = ink.soft;
    context.fillText(`rank ${rank}`, LEFT - 8, top + panel.row / 2 + 4);
    context.fillStyle = ink.idle;
    const end = panel.name === "planned" ? data.makespans.planned : data.makespans.measured;
    const [from, to] = [Math.max(LEFT, x(0)), Math.min(width - RIGHT, x(end))];
    if (to > from) context.fillRect(from, top, to - from, panel.row);
  }
}

function drawPasses(panel, ink) {
  context.textAlign = "center";
  context.font = "10px system-ui, sans-serif";
  panel.rows.forEach((row, rank) => {
    const top = y(panel, rank);
    const [low, high] = shown(row);
    for (let index = low; index < high; index++) {
      const pass = row[index];
      if (panel.name === "measured") drawGap(row[index - 1], pass, top, ink);
      const from = x(pass[START]), length = x(pass[END]) - from;
      const drawn = length - Math.min(1, 0.15 * length);
      context.globalAlpha = 1 - (0.5 * data.chunk[pass[STAGE]]) / data.chunks;
      context.fillStyle = data.colours[pass[KIND]];
      context.fillRect(from, top, drawn, panel.row);
      context.globalAlpha = 1;
      if (pass[SLOW] > 0) {
        const slow = Math.min(drawn, x(pass[SLOW]) - x(0));
        context.fillStyle = "rgb(0 0 0 / 38%)";
        context.fillRect(from + drawn - slow, top, slow, panel.row);
      }
      const text = String(pass[MICROBATCH]);
      // The planned length decides, so that either all passes of a kind have a number or none.
      const due = places.get(label(pass)).planned;
      if (6.5 * text.length + 2 < 0.97 * (x(due[END]) - x(due[START])) && panel.row > 12) {
        context.fillStyle = data.inks[pass[KIND]];
        context.fillText(text, from + drawn / 2, top + panel.row / 2 + 3.5);
      }
    }
  });
}

// Draw the ops on lanes of their own. Those of a class have the same shade: copies to the host, and back.
function drawLanes(panel, ink) {
  context.fillStyle = ink.soft;
  data.lanes[panel.name].forEach((row, rank) => {
    const top = y(panel, rank) + panel.row + 1;
    for (const [lane, shade, start, end] of row) {
      const from = x(start), length = x(end) - from;
      context.globalAlpha = 1 / (1 + shade);
      context.fillRect(from, top + lane * LANE, length - Math.min(1, 0.15 * length), LANE - 1);
    }
  });
  context.globalAlpha = 1;
}

// Draw why a rank was idle before a pass: host gaps, and how much later than planned the input arrived.
function drawGap(before, pass, top, ink) {
  const from = before ? before[END] : 0;
  const parts = [[from, pass[START], ink.host]];
  if (pass[WAITS_FOR]) {
    parts.push([pass[AWAITED], pass[ARRIVED], ink.idle]);
    const late = Math.min(pass[LATE], pass[ARRIVED] - pass[AWAITED]);
    if (late > 0) parts.push([pass[ARRIVED] - late, pass[ARRIVED], ink.late]);
  }
  for (const [start, end, fill] of parts) {
    context.fillStyle = fill;
    context.fillRect(x(start), top, x(end) - x(start), ROW);
  }
}

function drawKept(panel, ink) {
  for (let rank = 0; rank < ranks; rank++) {
    const top = y(panel, rank);
    for (const [name, curve, end] of [
      ["measured", data.kept.measured[rank], data.makespans.measured],
      ["planned", data.kept.planned[rank], data.makespans.planned],
    ]) {
      const height = (amount) => top + panel.row - (amount / data.kept.most) * (panel.row - 2);
      context.beginPath();
      context.moveTo(x(0), top + panel.row);
      let level = top + panel.row;
      for (const [at, amount] of curve) {
        context.lineTo(x(at), level);
        level = height(amount);
        context.lineTo(x(at), level);
      }
      context.lineTo(x(end), level);
      if (name === "measured") {
        context.lineTo(x(end), top + panel.row);
        context.fillStyle = data.colours.F;
        context.globalAlpha = 0.45;
        context.fill();
        context.globalAlpha = 1;
      } else {
        context.setLineDash([3, 3]);
        context.strokeStyle = ink.ink;
        context.lineWidth = 1;
        context.stroke();
        context.setLineDash([]);
      }
    }
  }
}

function drawHovered(ink) {
  const place = places.get(hovered);
  context.lineWidth = 2;
  context.strokeStyle = ink.mark;
  for (const panel of panels.slice(0, 2)) {
    const pass = place[panel.name], top = y(panel, place.rank);
    context.strokeRect(x(pass[START]) + 1, top + 1, Math.max(2, x(pass[END]) - x(pass[START]) - 2), panel.row - 2);
    const producer = places.get(pass[WAITS_FOR]);
    if (!producer) continue;
    const from = [x(producer[panel.name][END]), y(panel, producer.rank) + panel.row / 2];
    const to = [x(pass[START]), top + panel.row / 2];
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(...to);
    context.stroke();
    context.beginPath();
    context.arc(...from, 3.5, 0, 2 * Math.PI);
    context.fillStyle = ink.mark;
    context.fill();
  }
}

function drawAxis(ink) {
  const magnitude = 10 ** Math.floor(Math.log10((view[1] - view[0]) / 8));
  const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((each) => (view[1] - view[0]) / each <= 10);
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  for (let at = Math.ceil(view[0] / step) * step; at <= view[1]; at += step) {
    context.fillStyle = ink.line;
    context.fillRect(x(at), bottom, 1, 5);
    context.fillStyle = ink.soft;
    const text = `${Number(at.toPrecision(8))}`;
    if (x(at) < width - 24) context.fillText(Math.abs(at) < step / 2 ? "0 ms" : text, x(at), bottom + 17);
  }
}

function passAt(event) {
  const box = canvas.getBoundingClientRect();
  const at = [event.clientX - box.left, event.clientY - box.top];
  if (at[0] < LEFT) return null;
  for (const panel of panels.slice(0, 2)) {
    const rank = Math.floor((at[1] - panel.top) / pitch(panel));
    if (rank < 0 || rank >= ranks || at[1] < panel.top) continue;
    const time = ms(at[0]);
    // In a gap of the measured timeline, the following pass is selected: it shows why the rank was idle.
    const pass = panel.rows[rank].find((each) => time <= each[END]);
    if (pass && (time >= pass[START] || panel.name === "measured")) return label(pass);
  }
  return null;
}

function describe(name) {
  const place = places.get(name), planned = place.planned, ran = place.measured;
  const long = (pass) =>
    `${number(pass[START])} to ${number(pass[END])} ms, takes ${number(pass[END] - pass[START])} ms`;
  const lines = [
    `${WORDS[ran[KIND]]} of microbatch ${ran[MICROBATCH]}, stage ${ran[STAGE]}, rank ${place.rank}`,
    `planned: ${long(planned)}`,
    `measured: ${long(ran)}`,
  ];
  if (ran[WAITS_FOR]) {
    const waited = ran[ARRIVED] - ran[AWAITED], late = ran[LATE];
    const other = places.get(ran[WAITS_FOR]).rank;
    const difference = compared(late, "than planned");
    lines.push(`waited ${number(waited)} ms for ${ran[WAITS_FOR]} from rank ${other}, ${difference}`);
  }
  lines.push(`pass: ${compared(ran[SLOW], "than planned")}`, `host gap before it: ${number(ran[HOST])} ms`);
  return lines.join("\n");
}

function compared(difference, words) {
  const size = number(Math.abs(difference));
  return size === "0.00" ? "as planned" : `${size} ms ${difference > 0 ? "longer" : "shorter"} ${words}`;
}

function number(value) {
  return Math.abs(value) < 100 ? value.toFixed(2) : value.toFixed(1);
}

function hover(event) {
  const name = event && passAt(event);
  tip.hidden = !name;
  if (name) {
    const title = document.createElement("b");
    title.textContent = name;
    tip.replaceChildren(title, `\n${describe(name)}`);
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - box.width - 8)}px`;
    const below = event.clientY + 18;
    tip.style.top = `${below + box.height < window.innerHeight ? below : event.clientY - box.height - 12}px`;
  }
  if (name !== hovered) {
    hovered = name;
    draw();
  }
}

function show(from, length) {
  const shortest = data.longest / 1e4;
  length = Math.max(shortest, Math.min(length, data.longest));
  from = Math.max(0, Math.min(from, data.longest - length));
  view = [from, from + length];
  draw();
}

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  drag = { at: event.clientX, from: view[0] };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return hover(event);
  canvas.classList.add("dragged");
  const length = view[1] - view[0];
  show(drag.from - ((event.clientX - drag.at) / (width - LEFT - RIGHT)) * length, length);
});
for (const kind of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(kind, () => {
    drag = null;
    canvas.classList.remove("dragged");
  });
}
canvas.addEventListener("pointerleave", () => hover(null));
canvas.addEventListener("dblclick", () => show(0, data.longest));
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const around = ms(event.clientX - canvas.getBoundingClientRect().left);
  const length = (view[1] - view[0]) * Math.exp(event.deltaY * 0.0015);
  show(around - ((around - view[0]) / (view[1] - view[0])) * Math.min(length, data.longest), length);
}, { passive: false });
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
