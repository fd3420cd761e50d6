"use strict";
// Save a drawing as a standalone SVG, and a plan as the file that a job runs.

const HEAD = 44;  // height of the title and the legend
const SVG_SPACE = element("template", {innerHTML: "<svg></svg>"}).content.firstChild.namespaceURI;

const fileName = (id) => id.replaceAll(/[^\w.-]+/g, "-").replaceAll(/-+$/g, "");
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function save(name, type, text) {
  const link = element("a", {download: name, href: URL.createObjectURL(new Blob([text], {type}))});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

/** The button for the plan as a file, which a job runs. */
function planButton(picture) {
  const button = element("button", {type: "button", className: "copy", textContent: "save plan",
    title: "save plan.json, for --zero-bubble-schedule"});
  button.addEventListener("click", async () => {
    try {
      save("plan.json", "application/json", JSON.stringify(await ask(picture.query, undefined, "file"), null, 1));
    } catch (error) {
      say(error.message);
    }
  });
  return button;
}

/** What a picture shows now, as a standalone SVG with its title and legend. */
function svgOf(picture) {
  const {ink, width, height, rows, copies, high, pitch} = picture;
  const end = view.from + view.ms;
  const text = (x, y, words, size, colour, anchor = "start") =>
    `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" font-size="${size}" fill="${colour}" text-anchor="${anchor}">${escaped(words)}</text>`;
  const rect = (x, y, wide, tall, colour, more = "") =>
    `<rect x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${wide.toFixed(2)}" height="${tall.toFixed(2)}" fill="${colour}"${more}/>`;
  const title = `${picture.id}: ${picture.figures.textContent}`;
  const parts = [`<title>${escaped(title)}</title>`, rect(0, 0, width, height + HEAD + AXIS, ink.card),
    text(8, 16, title, 12, ink.text)];
  const shown = new Set(rows.flat().map(({kind}) => kind));
  let at = LEFT;
  for (const {kind, meaning} of CATALOGUE.kinds.filter(({kind}) => shown.has(kind))) {
    parts.push(rect(at, 24, 10, 10, COLOUR[kind]), text(at + 14, 33, meaning, 11, ink.faint));
    at += 30 + 6.2 * meaning.length;
  }
  parts.push(`<svg y="${HEAD}" width="${width}" height="${height + AXIS}">`);
  for (const ms of ticks(view.from, view.ms)) {
    const x = picture.x(ms);
    parts.push(rect(x, 0, 1, height + 4, ink.grid),
      text(x, height + 16, `${Number(ms.toPrecision(9))}${ms ? "" : " ms"}`, 11, ink.faint, "middle"));
  }
  rows.forEach((_, rank) => parts.push(text(LEFT - 8, rank * pitch + high / 2 + 4, `rank ${rank}`, 11, ink.faint, "end")));
  parts.push(`<svg x="${LEFT}" width="${width - LEFT - RIGHT}" height="${height}" viewBox="${LEFT} 0 ${width - LEFT - RIGHT} ${height}">`);
  rows.forEach((row, rank) => {
    parts.push(rect(picture.x(0), rank * pitch, picture.answer.plan.makespan_ms * picture.scale, high, ink.idle));
    for (const pass of row.filter((each) => each.end > view.from && each.start < end)) {
      const {x, y, wide} = picture.box(pass), size = high < 14 ? 9 : 11;
      const seen = wide < 3 ? wide : wide - Math.min(1, 0.15 * wide);
      parts.push(rect(x, y, seen, high, COLOUR[pass.kind], ` fill-opacity="${1 - pass.paleness}"`));
      if (wide < 4 + 0.6 * size * pass.microbatch.length) continue;
      parts.push(text(x + wide / 2, y + high / 2 + 0.36 * size, pass.microbatch, size, INK[pass.kind], "middle"));
    }
    for (const [op, from, to] of copies[rank]) {
      const y = rank * pitch + high + 1 + (op.endsWith("v") ? LANE : 0);
      parts.push(rect(picture.x(from), y, Math.max(0.5, (to - from) * picture.scale - 0.5), LANE - 1, LANE_COLOUR));
    }
  });
  return `<svg xmlns="${SVG_SPACE}" role="img" viewBox="0 0 ${width} ${height + HEAD + AXIS}" width="${width}" `
    + `font-family="system-ui, sans-serif">\n${parts.join("\n")}\n</svg></svg></svg>\n`;
}
