"use strict";
// The tip: a description of the selected pass.

const MEANING = Object.fromEntries(CATALOGUE.kinds.map(({kind, meaning}) => [kind, meaning.replace(/^\S+ /, "")]));
const SHARDS = new Set(CATALOGUE.kinds.filter(({shard}) => shard).map(({kind}) => kind));
const MOST_NAMED = 3;  // of the passes that a pass waits for or feeds: passes of the vocabulary do so on all ranks
const tip = document.getElementById("tip");

const shortMs = (ms) => `${Number(ms.toFixed(3))} ms`;
const named = ({text, rank}) => `${text} on rank ${rank}`;

/** Describe a pass in sentences: what it is, what it waits for, why it starts when it does, and what needs it. */
function describe(pass, before) {
  const {kind, microbatch, stage, rank, start, end, needs, feeds} = pass;
  const [whole, slice] = microbatch.split(".");
  // The text of a pass names no slice if it is the first, or the only one.
  const part = slice ? `slice ${slice} of microbatch ${whole}` : `microbatch ${whole}`;
  const place = SHARDS.has(kind) ? (kind === "L" ? "" : ", shard of") : `, stage ${stage} on`;
  const what = `${MEANING[kind]} of ${part}${place || " on"} rank ${rank}`;
  const sentences = [`${what}: ${shortMs(start)} to ${shortMs(end)}.`];
  sentences.push(needs.length ? waits(needs) : "Waits for no other pass.");
  const idle = start - (before?.end ?? 0);
  if (idle > 1e-9) sentences.push(`Rank ${rank} is idle for ${shortMs(idle)} before it.`);
  else if (before) sentences.push(`It directly follows ${before.text} on rank ${rank}.`);
  if (feeds.length > MOST_NAMED) sentences.push(`Needed by ${named(feeds[0])} and ${feeds.length - 1} other passes.`);
  else if (feeds.length) sentences.push(`Needed by ${feeds.map(named).join(" and by ")}.`);
  return sentences;
}

/** Say what a pass waits for: each result, or of many, the last one. */
function waits(needs) {
  if (needs.length > MOST_NAMED) {
    const {pass, arrives} = needs.reduce((last, need) => need.arrives > last.arrives ? need : last);
    return `Waits for ${needs.length} passes, last for ${named(pass)}, whose result arrives at ${shortMs(arrives)}.`;
  }
  const there = needs.map(({pass: need, arrives}) => `${named(need)}, whose result arrives at ${shortMs(arrives)}`);
  return `Waits for ${there.join(", and for ")}.`;
}

/** Show the tip below `spot`, in pixels of `canvas`, or above it if there is no room; `before` is the previous pass. */
function showTip(canvas, pass, before, spot) {
  const [first, ...rest] = describe(pass, before);
  tip.replaceChildren(element("b", {textContent: pass.text}), ` ${first}`,
    ...rest.map((textContent) => element("span", {textContent})));
  tip.hidden = false;
  const board = canvas.getBoundingClientRect();
  const {offsetWidth: wide, offsetHeight: high} = tip;
  const room = document.documentElement.clientWidth - wide - 8;
  const below = board.top + spot.bottom + 8;
  const top = below + high < innerHeight ? below : board.top + spot.top - high - 8;
  const left = Math.max(8, Math.min(board.left + spot.x - wide / 2, room));
  Object.assign(tip.style, {left: `${left + scrollX}px`, top: `${top + scrollY}px`});
}

function hideTip() {
  tip.hidden = true;
}
