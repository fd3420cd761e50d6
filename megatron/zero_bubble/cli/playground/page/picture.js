"use strict";
// The drawing of one schedule: one row per rank, time to the right, and a layer above for the selected pass.

const LEFT = 52, RIGHT = 8, AXIS = 22, LANE = 4;
const COLOUR = Object.fromEntries(CATALOGUE.kinds.map(({kind, colour}) => [kind, colour]));
const INK = Object.fromEntries(CATALOGUE.kinds.map(({kind, ink}) => [kind, ink]));
const LANE_COLOUR = CATALOGUE.lane;

/** The passes of a drawing by rank. `linkPasses` adds the passes that each waits for, and those that need it. */
function passesOf(plan, {order, times}) {
  const chunks = {};
  const chunkOf = plan.stage_to_rank.map((rank) => (chunks[rank] = (chunks[rank] ?? -1) + 1));
  return order.map((row, rank) => row.map((text, position) => {
    const [, stage, kind, microbatch] = /^(\d+)([A-Z]+)(.+)$/.exec(text);
    const [start, end] = times[rank][position];
    const paleness = 0.5 * chunkOf[stage] / (chunks[rank] + 1);
    return {text, rank, position, stage: Number(stage), kind, microbatch, start, end, paleness};
  }));
}

function linkPasses(rows, waits) {
  const byText = new Map();
  for (const pass of rows.flat()) byText.set(pass.text, Object.assign(pass, {needs: [], feeds: []}));
  for (const pass of byText.values()) {
    for (const [text, arrives] of waits[pass.rank][pass.position]) {
      pass.needs.push({pass: byText.get(text), arrives});
      byText.get(text).feeds.push(pass);
    }
  }
}

/** The first position in a row, sorted by time, at which a pass ends after `ms`. */
function firstAfter(row, ms) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle].end > ms) high = middle; else low = middle + 1;
  }
  return low;
}

/** Times for an axis of `length` ms: at most ten intervals between round numbers. */
function ticks(from, length) {
  const magnitude = 10 ** Math.floor(Math.log10(length / 8));
  const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((ms) => length / ms <= 10);
  const first = Math.ceil(from / step * (1 - 1e-9)), last = Math.floor((from + length) / step * (1 + 1e-9));
  return Array.from({length: last - first + 1}, (_, k) => (first + k) * step);
}

// A drawing is loaded when it comes near the visible part of the page, and forgotten when it leaves it.
const near = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) target.picture.near(isIntersecting);
}, {rootMargin: "200px"});

class Picture {
  constructor(id) {
    this.id = id;
    this.base = element("canvas");
    this.layer = element("canvas", {className: "layer", tabIndex: 0});
    this.layer.setAttribute("role", "application");
    this.title = element("h2", {textContent: id});
    this.figures = element("p", {className: "figures"});
    this.command = element("code");
    this.run = element("p", {className: "run"});
    const saveSvg = element("button", {type: "button", className: "copy", textContent: "save SVG",
      title: "save what is shown as a picture"});
    saveSvg.addEventListener("click", () => { if (this.rows) save(`${fileName(id)}.svg`, "image/svg+xml", svgOf(this)); });
    const saving = element("span", {className: "saving"}, saveSvg, planButton(this));
    const board = element("div", {className: "board"}, this.base, this.layer);
    this.element = element("figure", {id: `picture-${id.replaceAll(" ", "-")}`},
      element("figcaption", {}, this.title, this.figures, saving), board, this.run, this.command);
    this.element.picture = this;
    this.rows = this.selected = null;
    near.observe(this.element);
    const moved = followPointer(this.layer, (x) => (x - LEFT) / (this.width - LEFT - RIGHT));
    this.layer.addEventListener("pointermove", (event) => {
      this.select(moved() ? null : this.at(event.offsetX, event.offsetY));
    });
    this.layer.addEventListener("pointerleave", () => this.select(null));
    this.layer.addEventListener("focus", () => this.select(this.selected ?? this.rows?.[0][0] ?? null));
    this.layer.addEventListener("blur", () => this.select(null));
    this.layer.addEventListener("keydown", (event) => this.key(event));
  }

  /** Set the answer to show; `draw` loads its passes and draws it. */
  set(answer, {query, summary}) {
    this.answer = answer;
    this.query = query;
    this.title.title = summary;
    this.command.textContent = answer.command ?? "";
    this.run.textContent = answer.run ?? "";
    const {num_ranks: p, num_microbatches: m, num_slices: n} = answer.plan;
    const way = "Arrow keys move between passes; Enter moves to the pass that the selected pass waits for; "
      + "plus and minus zoom, and 0 shows everything.";
    this.layer.setAttribute("aria-label", `${this.id}: ${p} ranks, ${m} microbatches${n ? ` of ${n} slices` : ""}. ${way}`);
    this.select(null);
  }

  /** Whether the drawing is near the visible part of the page; a distant one needs no memory for its passes. */
  near(is) {
    this.isNear = is;
    if (is) return this.draw();
    this.select(null);
    this.rows = this.waits = this.shown = null;
    this.base.width = this.layer.width = 0;
    delete this.element.dataset.drawn;
  }

  /** Ask for the passes of the answer, then draw them. */
  async load() {
    const {answer, query} = this;
    if (this.loading === answer) return;
    this.loading = answer;
    try {
      const drawing = await ask(query, undefined, "drawing");
      if (this.answer !== answer || !this.isNear) return;
      this.rows = passesOf(answer.plan, drawing);
      this.waits = drawing.waits_for;
      this.copies = drawing.copies;
      this.shown = answer;
      this.draw();
    } catch (error) {
      say(error.message);
    } finally {
      if (this.loading === answer) this.loading = null;
    }
  }

  /** Reserve the room; near the visible part of the page, draw everything. */
  draw() {
    const count = this.answer.plan.num_ranks;
    this.width = this.element.querySelector(".board").clientWidth;
    this.pitch = count <= 8 ? 24 : count <= 16 ? 18 : 12;
    this.high = this.pitch - Math.max(2, this.pitch >> 3);
    if (this.answer.plan.offload) this.pitch += 2 * LANE;  // the copies of a rank, below its passes
    this.scale = (this.width - LEFT - RIGHT) / view.ms;
    this.height = count * this.pitch;
    Object.assign(this.layer.dataset, {left: LEFT, scale: this.scale, pitch: this.pitch});
    for (const canvas of [this.base, this.layer]) {
      Object.assign(canvas.style, {width: `${this.width}px`, height: `${this.height + AXIS}px`});
    }
    if (!this.isNear) return;
    if (this.shown !== this.answer) {
      delete this.element.dataset.drawn;
      this.load();
      return;
    }
    this.paint();
    this.element.dataset.drawn = "";
  }

  paint() {
    const style = getComputedStyle(document.documentElement);
    this.ink = Object.fromEntries(
      ["text", "faint", "idle", "grid", "card", "mark"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    for (const canvas of [this.base, this.layer]) {
      canvas.width = this.width * devicePixelRatio;
      canvas.height = (this.height + AXIS) * devicePixelRatio;
      canvas.getContext("2d").setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    }
    const ink = this.base.getContext("2d");
    ink.font = "11px system-ui, sans-serif";
    this.drawAxis(ink);
    this.rows.forEach((_, rank) => this.drawName(ink, rank));
    this.clip(ink);
    this.rows.forEach((row, rank) => this.drawRow(ink, row, rank));
    const pass = this.selected;
    this.selected = null;
    if (pass) this.select(pass);
  }

  /** Restrict what follows to the time axis. */
  clip(ink) {
    ink.beginPath();
    ink.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height);
    ink.clip();
  }

  drawAxis(ink) {
    ink.textAlign = "center";
    for (const ms of ticks(view.from, view.ms)) {
      const x = this.x(ms);
      ink.fillStyle = this.ink.grid;
      ink.fillRect(x, 0, 1, this.height + 4);
      ink.fillStyle = this.ink.faint;
      ink.fillText(`${Number(ms.toPrecision(9))}${ms ? "" : " ms"}`, x, this.height + 16);
    }
  }

  drawName(ink, rank) {
    ink.fillStyle = this.ink.faint;
    ink.textAlign = "right";
    ink.fillText(`rank ${rank}`, LEFT - 8, rank * this.pitch + this.high / 2 + 4);
  }

  drawRow(ink, row, rank) {
    ink.fillStyle = this.ink.idle;
    ink.fillRect(this.x(0), rank * this.pitch, this.answer.plan.makespan_ms * this.scale, this.high);
    const end = view.from + view.ms;
    for (let at = firstAfter(row, view.from); at < row.length && row[at].start < end; at++) this.drawPass(ink, row[at]);
    ink.fillStyle = LANE_COLOUR;
    for (const [op, from, to] of this.copies[rank]) {
      if (to > view.from && from < end) {
        const y = rank * this.pitch + this.high + 1 + (op.endsWith("v") ? LANE : 0);  // those back below those out
        ink.fillRect(this.x(from), y, Math.max(0.5, (to - from) * this.scale - 0.5), LANE - 1);
      }
    }
  }

  /** Draw one pass, with the number of its microbatch if it fits. */
  drawPass(ink, pass) {
    const {x, y, wide, high} = this.box(pass);
    ink.globalAlpha = 1 - pass.paleness;
    ink.fillStyle = COLOUR[pass.kind];
    // Leave a thin gap between neighbours, but none between passes so narrow that the gaps would look like idle time.
    ink.fillRect(x, y, wide < 3 ? wide : wide - Math.min(1, 0.15 * wide), high);
    ink.globalAlpha = 1;
    const size = high < 14 ? 9 : 11;
    if (wide < 4 + 0.6 * size * pass.microbatch.length) return;
    ink.font = `${size}px system-ui, sans-serif`;
    ink.fillStyle = INK[pass.kind];
    ink.textAlign = "center";
    ink.fillText(pass.microbatch, x + wide / 2, y + high / 2 + 0.36 * size);
  }

  x(ms) {
    return LEFT + (ms - view.from) * this.scale;
  }

  box({rank, start, end}) {
    return {x: this.x(start), y: rank * this.pitch, wide: (end - start) * this.scale, high: this.high};
  }

  /** Return the pass at a point, or null. */
  at(x, y) {
    if (x < LEFT || !this.rows) return null;
    const ms = view.from + (x - LEFT) / this.scale, row = this.rows[Math.floor(y / this.pitch)] ?? [];
    const pass = row[firstAfter(row, ms)];
    return pass?.start <= ms ? pass : null;
  }

  /** Highlight a pass, the passes that it waits for and those that need it, and describe it; null clears everything. */
  select(pass) {
    if (pass === this.selected && pass !== null) return;
    if (pass === null && this.selected === null) return;  // the tip may belong to another drawing
    this.selected = pass;
    const ink = this.layer.getContext("2d");
    ink.clearRect(0, 0, this.layer.width, this.layer.height);
    if (pass === null) return hideTip();
    if (!pass.needs) linkPasses(this.rows, this.waits);
    ink.save();
    this.clip(ink);
    ink.globalAlpha = 0.72;
    ink.fillStyle = this.ink.card;
    ink.fillRect(LEFT, 0, this.layer.width, this.height);
    ink.globalAlpha = 1;
    const needs = pass.needs.map((need) => need.pass);
    for (const other of [...needs, ...pass.feeds, pass]) this.drawPass(ink, other);
    for (const need of needs) this.connect(ink, need, pass, []);
    for (const feed of pass.feeds) this.connect(ink, pass, feed, [3, 3]);
    this.outline(ink, pass, 2.5);
    for (const other of [...needs, ...pass.feeds]) this.outline(ink, other, 1);
    ink.restore();
    // The tip is placed outside the rows with highlighted passes, so that it covers none of them.
    const ranks = [pass, ...needs, ...pass.feeds].map(({rank}) => rank);
    const {x, wide} = this.box(pass), top = Math.min(...ranks) * this.pitch;
    const spot = {x: x + wide / 2, top, bottom: (Math.max(...ranks) + 1) * this.pitch};
    showTip(this.layer, pass, this.rows[pass.rank][pass.position - 1], spot);
  }

  outline(ink, pass, width) {
    const {x, y, wide, high} = this.box(pass);
    ink.setLineDash([]);
    ink.strokeStyle = this.ink.mark;
    ink.lineWidth = width;
    ink.strokeRect(x, y, Math.max(wide, 1), high);
  }

  /** Draw a line from the end of one pass to the start of another. */
  connect(ink, from, to, dash) {
    const a = this.box(from), b = this.box(to);
    const [x1, y1, x2, y2] = [a.x + a.wide, a.y + a.high / 2, b.x, b.y + b.high / 2];
    const bend = Math.max(4, Math.abs(x2 - x1) / 2);
    ink.setLineDash(dash);
    ink.strokeStyle = this.ink.mark;
    ink.lineWidth = 1.5;
    ink.beginPath();
    ink.moveTo(x1, y1);
    ink.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    ink.stroke();
  }

  key(event) {
    if (!this.rows) return;
    const zoom = {"+": () => view.zoom(1.5), "-": () => view.zoom(1 / 1.5), 0: () => view.show(0, 1)}[event.key];
    if (zoom) return zoom();
    const {rank, position, start, needs} = this.selected ?? this.rows[0][0];
    const nearest = (row) => row?.[Math.min(firstAfter(row, start), row.length - 1)];
    const next = {
      ArrowLeft: this.rows[rank][position - 1],
      ArrowRight: this.rows[rank][position + 1],
      ArrowUp: nearest(this.rows[rank - 1]),
      ArrowDown: nearest(this.rows[rank + 1]),
      Enter: needs?.[0]?.pass,
    };
    if (event.key === "Escape") this.select(null);
    else if (event.key in next) {
      event.preventDefault();
      if (!next[event.key]) return;
      this.select(next[event.key]);
      view.reveal(this.selected.start, this.selected.end);
    }
  }
}
