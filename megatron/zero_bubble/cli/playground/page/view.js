"use strict";
// The view: the part of the time axis that all drawings show. Ctrl and the wheel zoom it, dragging moves it.

const SHORTEST = 1 / 500;  // of the longest makespan
const view = {
  longest: 1,  // ms: the longest makespan of all drawings
  start: 0, length: 1,  // in parts of `longest`, so that they remain valid when the costs change
  get from() { return this.start * this.longest; },
  get ms() { return this.length * this.longest || 1; },

  /** Show `length` from `start` on, as far as the time axis goes, and draw. */
  show(start, length) {
    this.length = Math.max(SHORTEST, Math.min(1, length));
    this.start = Math.max(0, Math.min(1 - this.length, start));
    if (!this.waiting) requestAnimationFrame(() => { this.waiting = false; draw(); });
    this.waiting = true;
  },

  /** Change the magnification by a factor, around a point at `part` of the width. */
  zoom(factor, part = 0.5) {
    const length = Math.max(SHORTEST, Math.min(1, this.length / factor));
    this.show(this.start + part * (this.length - length), length);
  },

  /** Move so that the time from `start` to `end`, in ms, is shown. */
  reveal(start, end) {
    if (start >= this.from && end <= this.from + this.ms) return;
    this.show((start + end) / 2 / this.longest - this.length / 2, this.length);
  },
};

/** Let the pointer zoom and move the view on a canvas; return a function that says whether it is being moved. */
function followPointer(canvas, partAt) {
  let held = null;
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;  // the wheel alone scrolls the page
    event.preventDefault();
    view.zoom(Math.exp(-event.deltaY * 0.0015), partAt(event.offsetX));
  }, {passive: false});
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) held = {part: partAt(event.offsetX), start: view.start, id: event.pointerId};
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held || view.length === 1) return;
    canvas.setPointerCapture(held.id);
    canvas.classList.add("moved");
    view.show(held.start - (partAt(event.offsetX) - held.part) * view.length, view.length);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => {
      held = null;
      canvas.classList.remove("moved");
    });
  }
  canvas.addEventListener("dblclick", () => view.show(0, 1));
  return () => canvas.classList.contains("moved");
}
