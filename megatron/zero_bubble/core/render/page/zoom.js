// Zooms and moves an SVG drawing in time: the wheel zooms around the pointer, dragging moves, a double click resets.
// Viewers that run no scripts show the drawing as it is. It is redrawn, not scaled, so that the gaps between passes
// stay thin and the numbers appear where there is room. LEFT, RIGHT and DIGIT are those of svg.py, in pixels.
"use strict";
(() => {
  const svg = document.currentScript.parentNode;
  const [, , WIDTH] = svg.getAttribute("viewBox").split(" ").map(Number);
  const END = WIDTH - RIGHT, MOST = 200;
  const create = (name, attributes) => {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const attribute = (one, name) => Number(one.getAttribute(name));
  const all = (selector) => [...svg.querySelectorAll(selector)];

  // A pass is drawn narrower than its time, by a gap of at most one pixel (svg.py): undo that.
  const paths = all("path[fill-opacity]").map((path) => {
    const numbers = path.dataset.numbers?.split(" ");
    const boxes = [...path.getAttribute("d").matchAll(/M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)/g)];
    return {path, passes: boxes.map(([, ...box], at) => {
      const [x, y, drawn, height] = box.map(Number);
      return {x, y, height, width: drawn < 0.85 / 0.15 ? drawn / 0.85 : drawn + 1, number: numbers?.[at] ?? String(at)};
    })};
  });
  const bars = all("rect.idle:not([rx])").map((bar) => (
    {bar, x: attribute(bar, "x"), width: attribute(bar, "width")}));
  const curves = all("path.kept, path.due").map((path) => ({path, d: path.getAttribute("d")}));
  const ticks = all("text.tick"), grid = all("path.grid");
  const [top, bottom] = [36, Number(grid[0].getAttribute("d").split("V")[1])];
  const last = ticks.at(-1);
  const msPerPixel = ticks.length > 1 ? Number(last.textContent) / (attribute(last, "x") - LEFT) : 0;
  const labels = create("g", {});
  const axis = create("g", {});
  const still = all("text.mb");
  let from = LEFT, scale = 1, waiting = false;  // the drawing's x at the left edge, and the magnification

  const place = (x) => Math.max(LEFT, Math.min(END, LEFT + (x - from) * scale));

  function drawPasses() {
    labels.replaceChildren();
    for (const {path, passes} of paths) {
      let d = "";
      for (const {x, y, width, height, number} of passes) {
        const start = place(x), stop = place(x + width), shown = stop - start;
        if (shown <= 0) continue;
        const drawn = shown - Math.min(1, 0.15 * shown);
        d += `M${start.toFixed(2)} ${y}h${drawn.toFixed(2)}v${height}h-${drawn.toFixed(2)}z`;
        if (DIGIT * number.length >= drawn) continue;
        const label = create("text", {
          class: `mb on-${path.getAttribute("class")}`, x: (start + drawn / 2).toFixed(1), y: y + height / 2 + 3.5});
        label.textContent = number;
        labels.append(label);
      }
      path.setAttribute("d", d);
    }
  }

  function drawAxis() {
    axis.replaceChildren();
    if (!msPerPixel) return;
    const width = (END - LEFT) / scale * msPerPixel, first = (from - LEFT) * msPerPixel;
    const magnitude = 10 ** Math.floor(Math.log10(width / 8));
    const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((ms) => width / ms <= 10);
    for (let k = Math.ceil(first / step - 1e-9); k * step <= first + width; k++) {
      const x = place(LEFT + k * step / msPerPixel).toFixed(1);
      const text = create("text", {class: "tick", x, y: bottom + 14});
      text.textContent = `${Number((k * step).toPrecision(9))}${k ? "" : " ms"}`;
      axis.append(create("path", {class: "grid", d: `M${x} ${top}V${bottom}`}), text);
    }
  }

  function draw() {
    waiting = false;
    for (const old of [...still, ...ticks, ...grid]) old.remove();
    drawPasses();
    drawAxis();
    for (const {bar, x, width} of bars) {
      bar.setAttribute("x", place(x));
      bar.setAttribute("width", place(x + width) - place(x));
    }
    for (const {path, d} of curves) {
      path.setAttribute("d", d.replace(/([MH])([\d.]+)/g, (_, letter, x) => letter + place(Number(x)).toFixed(2)));
    }
  }

  function show(left, magnification) {
    scale = magnification;
    from = Math.max(LEFT, Math.min(END - (END - LEFT) / scale, left));
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  }

  const pointer = (event) => {
    const matrix = svg.getScreenCTM();
    return (event.clientX - matrix.e) / matrix.a;
  };
  svg.addEventListener("wheel", (event) => {
    const x = pointer(event);
    if (x < LEFT) return;  // over the names of the ranks, the wheel scrolls
    event.preventDefault();
    const under = from + (x - LEFT) / scale;
    const next = Math.max(1, Math.min(MOST, scale * Math.exp(-event.deltaY * 0.0015)));
    show(under - (x - LEFT) / next, next);
  }, {passive: false});
  let held = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = {x: pointer(event), y: event.clientY, from};
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!held) return;
    show(held.from - (pointer(event) - held.x) / scale, scale);
    window.scrollBy(0, held.y - event.clientY);
    held.y = event.clientY;
  });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => { held = null; });
  svg.addEventListener("dblclick", () => show(LEFT, 1));
  svg.style.userSelect = "none";
  grid[0].before(axis);
  svg.append(labels);
})();
