"use strict";
// The drawing of one schedule: one row per rank, time to the right, and a layer above for the selected pass.

const LEFT = 52, AXIS = 22;
const COLOUR = Object.fromEntries(CATALOGUE.kinds.map(({kind, colour}) => [kind, colour]));

/** The answer's passes by rank, each linked to the passes that it waits for and the passes that need it. */
function linkPasses({plan, times, waits_for: waits}) {
  const chunks = {}, byText = new Map();
  const chunkOf = plan.stage_to_rank.map((rank) => (chunks[rank] = (chunks[rank] ?? -1) + 1));
  const rows = plan.order.map((row, rank) => row.map((text, position) => {
    const [, stage, kind, microbatch] = /^(\d+)([FBW]+)(.+)$/.exec(text);
    const [start, end] = times[rank][position];
    const pass = {text, rank, position, stage: Number(stage), kind, microbatch, start, end, needs: [], feeds: []};
    pass.paleness = 0.5 * chunkOf[pass.stage] / (chunks[rank] + 1);
    byText.set(text, pass);
    return pass;
  }));
  for (const pass of byText.values()) {
    for (const [text, arrives] of waits[pass.rank][pass.position]) {
      pass.needs.push({pass: byText.get(text), arrives});
      byText.get(text).feeds.push(pass);
    }
  }
  return rows;
}

/** Times for an axis up to `longest` ms: at most ten intervals between round numbers. */
function ticks(longest) {
  if (!(longest > 0)) return [0];
  const magnitude = 10 ** Math.floor(Math.log10(longest / 8));
  const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((ms) => longest / ms <= 10);
  return Array.from({length: Math.floor(longest / step * (1 + 1e-9)) + 1}, (_, k) => k * step);
}

class Picture {
  constructor(id) {
    this.id = id;
    this.base = element("canvas");
    this.layer = element("canvas", {className: "layer", tabIndex: 0});
    this.layer.setAttribute("role", "application");
    this.title = element("h2", {textContent: id});
    this.figures = element("p", {className: "figures"});
    this.command = element("code");
    const board = element("div", {className: "board"}, this.base, this.layer);
    this.element = element("figure", {id: `picture-${id.replaceAll(" ", "-")}`},
      element("figcaption", {}, this.title, this.figures), board, this.command);
    this.layer.addEventListener("pointermove", (event) => this.select(this.at(event.offsetX, event.offsetY)));
    this.layer.addEventListener("pointerleave", () => this.select(null));
    this.layer.addEventListener("focus", () => this.select(this.selected ?? this.rows[0][0]));
    this.layer.addEventListener("blur", () => this.select(null));
    this.layer.addEventListener("keydown", (event) => this.key(event));
  }

  /** Set the answer to show; `draw` draws it. */
  set(answer, summary) {
    this.rows = linkPasses(answer);
    this.plan = answer.plan;
    this.title.title = summary;
    this.command.textContent = answer.command;
    const {num_ranks: p, num_microbatches: m} = this.plan;
    const way = "Arrow keys move between passes; Enter moves to the pass that the selected pass waits for.";
    this.layer.setAttribute("aria-label", `${this.id}: ${p} ranks, ${m} microbatches. ${way}`);
    this.selected = null;
  }

  /** Draw everything; the width represents `longest` ms. */
  draw(longest) {
    const width = this.element.querySelector(".board").clientWidth;
    this.pitch = this.rows.length <= 8 ? 24 : this.rows.length <= 16 ? 18 : 12;
    this.scale = (width - LEFT - 8) / (longest || 1);
    this.height = this.rows.length * this.pitch;
    Object.assign(this.layer.dataset, {left: LEFT, scale: this.scale, pitch: this.pitch});
    const style = getComputedStyle(document.documentElement);
    this.ink = Object.fromEntries(
      ["text", "faint", "idle", "grid", "card", "mark"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    for (const canvas of [this.base, this.layer]) {
      canvas.width = width * devicePixelRatio;
      canvas.height = (this.height + AXIS) * devicePixelRatio;
      Object.assign(canvas.style, {width: `${width}px`, height: `${this.height + AXIS}px`});
      canvas.getContext("2d").setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    }
    const ink = this.base.getContext("2d");
    ink.font = "11px system-ui, sans-serif";
    this.drawAxis(ink, longest);
    this.rows.forEach((row, rank) => this.drawRow(ink, row, rank));
    this.select(null);
  }

  drawAxis(ink, longest) {
    ink.textAlign = "center";
    for (const ms of ticks(longest)) {
      const x = LEFT + ms * this.scale;
      ink.fillStyle = this.ink.grid;
      ink.fillRect(x, 0, 1, this.height + 4);
      ink.fillStyle = this.ink.faint;
      ink.fillText(`${Number(ms.toPrecision(6))}${ms ? "" : " ms"}`, x, this.height + 16);
    }
  }

  drawRow(ink, row, rank) {
    const y = rank * this.pitch, high = this.pitch - Math.max(2, this.pitch >> 3);
    ink.fillStyle = this.ink.faint;
    ink.textAlign = "right";
    ink.fillText(`rank ${rank}`, LEFT - 8, y + high / 2 + 4);
    ink.fillStyle = this.ink.idle;
    ink.fillRect(LEFT, y, this.plan.makespan_ms * this.scale, high);
    for (const pass of row) this.drawPass(ink, pass);
  }

  /** Draw one pass, with the number of its microbatch if it fits. */
  drawPass(ink, pass) {
    const {x, y, wide, high} = this.box(pass);
    ink.globalAlpha = 1 - pass.paleness;
    ink.fillStyle = COLOUR[pass.kind];
    // Leave a thin gap between neighbours, but never so wide that a short pass disappears.
    ink.fillRect(x, y, wide - Math.min(1, 0.15 * wide), high);
    ink.globalAlpha = 1;
    if (high < 14 || wide < 4 + 6.5 * pass.microbatch.length) return;
    ink.fillStyle = pass.paleness ? this.ink.text : "#fff";
    ink.textAlign = "center";
    ink.fillText(pass.microbatch, x + wide / 2, y + high / 2 + 4);
  }

  box({rank, start, end}) {
    const high = this.pitch - Math.max(2, this.pitch >> 3);
    return {x: LEFT + start * this.scale, y: rank * this.pitch, wide: (end - start) * this.scale, high};
  }

  /** Return the pass at a point, or null. */
  at(x, y) {
    const ms = (x - LEFT) / this.scale;
    return this.rows[Math.floor(y / this.pitch)]?.find(({start, end}) => start <= ms && ms < end) ?? null;
  }

  /** Highlight a pass, the passes that it waits for and those that need it, and describe it; null clears everything. */
  select(pass) {
    if (pass === this.selected && pass !== null) return;
    this.selected = pass;
    const ink = this.layer.getContext("2d");
    ink.clearRect(0, 0, this.layer.width, this.layer.height);
    if (pass === null) return hideTip();
    ink.font = "11px system-ui, sans-serif";
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
    const {rank, position, start, needs} = this.selected ?? this.rows[0][0];
    const nearest = (row) => row?.find(({end}) => end > start) ?? row?.at(-1);
    const next = {
      ArrowLeft: this.rows[rank][position - 1],
      ArrowRight: this.rows[rank][position + 1],
      ArrowUp: nearest(this.rows[rank - 1]),
      ArrowDown: nearest(this.rows[rank + 1]),
      Enter: needs[0]?.pass,
    };
    if (event.key === "Escape") this.select(null);
    else if (event.key in next) {
      event.preventDefault();
      if (next[event.key]) this.select(next[event.key]);
    }
  }
}
