"use strict";
// Where answers come from: a server, or on a page without one, the planner itself, in a worker of this browser.

const LONG_MS = 3000;  // so long a question that nobody waits for may still take; a new worker starts in about this time
const NEEDS = "the planner needs WebAssembly, and a file server such as python -m http.server";

/** Return the answer about a `part`, plan, drawing or file, or throw an Error with its message. */
async function ask(query, signal, part = "plan") {
  const content = JSON.parse(await source.ask(query, signal, part));
  if (content.error) throw new Error(content.error);
  return content;
}

class Server {
  ready = Promise.resolve();

  async ask(query, signal, part) {
    try {
      const reply = await fetch(`${part}?${query}`, {signal});
      return await reply.text();
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Error("the server does not answer; check that zero-bubble playground is still running", {cause: error});
    }
  }
}

/** The planner in a worker (worker.js), which answers one question at a time. */
class Planner {
  turn = Promise.resolve();

  constructor() {
    this.restart();
  }

  restart() {
    this.worker?.terminate();
    this.leave?.(new Error("nobody waits for this answer"));
    this.ready = this.start();
    this.ready.catch(() => {});  // every question says it
  }

  async start() {
    let problem;
    try {
      this.worker = new Worker("worker.js");  // a page from a folder may have none
      problem = await this.message();
    } catch (error) {
      throw new Error(NEEDS, {cause: error});
    }
    if (problem) throw new Error(`${NEEDS}; ${problem}`);
  }

  /** Return the next message of the worker; the first one is empty, or says why it cannot start. */
  message() {
    return new Promise((resolve, reject) => {
      this.leave = this.worker.onerror = reject;
      this.worker.onmessage = ({data}) => resolve(data);
    });
  }

  ask(query, signal, part) {
    const answer = this.turn.then(() => this.answer(query, signal, part));
    this.turn = answer.catch(() => {});
    return answer;
  }

  async answer(query, signal, part) {
    let timer;
    const abandon = () => { timer = setTimeout(() => this.restart(), LONG_MS); };
    await this.ready;
    signal?.throwIfAborted();
    signal?.addEventListener("abort", abandon);
    this.worker.postMessage({query, part});
    try {
      return await this.message();
    } finally {
      signal?.removeEventListener("abort", abandon);
      clearTimeout(timer);
    }
  }
}

const source = CATALOGUE.has_server ? new Server() : new Planner();
