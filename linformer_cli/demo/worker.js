// Runs the engine beside the page, so that the page stays responsive. A new job ends the current one.

import { Runner, startEngine } from "./engine.js";

const FEW = 2; // a smaller effective sample size means that a completion may not fit
const SLICE = 12; // milliseconds of work before the worker looks for a new job
const programs = {}; // program files by name
const runners = new Map();
let engine, current;
let bits = []; // of the values that `step` has drawn

// A runner keeps a copy of its weights, so it is used again.
function runnerFor(use, batch = 1, name = "model") {
  const key = `${use} ${batch} ${name}`;
  if (!runners.has(key)) runners.set(key, new Runner(engine, programs[name], batch));
  return runners.get(key);
}

const JOBS = {
  // Keeps the `given` values that are not -1, and draws the others in several ways.
  *complete({ given, seed, count, tries, label, guidance }) {
    const began = performance.now();
    const each = guidance === 1 ? 1 : 2;
    const kept = given.indexOf(-1) < 0 ? given.length : given.indexOf(-1);
    if (given.some((value, n) => n > kept && value >= 0)) {
      return yield* drawAround({ given, seed, count, tries, label, guidance, each, began });
    }
    const [prefix, runner] = [runnerFor("prefix", each), runnerFor("complete", each * count)];
    for (const one of [prefix, runner]) {
      one.setGuidance(guidance);
      one.start(seed, 0, label);
    }
    for (const value of given.slice(0, kept)) yield void prefix.give(value);
    runner.continueFrom(prefix);
    yield* drawAll(runner, { began, from: kept });
  },

  // Draws images number 0, 1 and so on.
  *sample({ seed, count, label, guidance, temperature }) {
    const runner = runnerFor("sample", guidance === 1 ? count : 2 * count);
    runner.setGuidance(guidance);
    runner.setTemperature(temperature);
    runner.start(seed, 0, label);
    yield* drawAll(runner, { began: performance.now(), from: 0 });
  },

  // Begins the image whose values `step` draws one by one.
  *inspect({ seed, label }) {
    runnerFor("inspect").start(seed, 0, label);
    bits = [];
    yield* JOBS.step({ count: 0 });
  },

  // Draws `count` values. `bits` are the information of all values so far, and `probabilities` those of the next one.
  *step({ count }) {
    const runner = runnerFor("inspect");
    const end = Math.min(runner.known + count, runner.values);
    while (runner.known < end) {
      const probabilities = runner.probabilities();
      runner.draw();
      bits.push(-Math.log2(probabilities[runner.lastValue()]));
      yield;
    }
    const done = runner.known === runner.values;
    const states = [];
    for (let layer = 0; layer < runner.layers; layer++) {
      states.push([]);
      for (let number = 0, state; (state = runner.state(layer, number)); number++) {
        if (state.length % 4 === 0) states[layer].push(new Float32Array(state.slice().buffer));
      }
    }
    const probabilities = done ? null : runner.probabilities();
    yield { done, known: runner.known, pixels: runner.pixels(), bits, states, probabilities };
  },

  // Draws images with the model and with its rival for the same time each, until another job begins.
  *race({ seed, rival }) {
    programs.rival = rival;
    const lanes = ["model", "rival"].map((name, lane) => ({ lane, runner: runnerFor("race", 1, name), spent: 0, images: 0 }));
    for (const { runner } of lanes) runner.start(seed);
    for (;;) {
      const next = lanes[0].spent <= lanes[1].spent ? lanes[0] : lanes[1];
      const { runner, lane } = next;
      if (runner.known === runner.values) runner.start(seed, ++next.images);
      const [first, count] = [runner.known, runner.width * runner.channels];
      const began = performance.now();
      while (runner.known < first + count) {
        runner.probabilities(); // without look-ahead, which would depend on what is drawn
        runner.draw();
      }
      const milliseconds = performance.now() - began;
      next.spent += milliseconds;
      const images = next.images + runner.known / runner.values;
      const [pixels, state] = [runner.pixels(), runner.stateBytes()];
      yield { lane, known: runner.known, each: milliseconds / count, images, pixels, state };
    }
  },
};

// Draws completions one after the other, each of its own particles, if values are given after others that are not. `few`
// counts the completions that rest on one or two particles.
function* drawAround({ given, seed, count, tries, label, guidance, each, began }) {
  const particles = tries * Math.max(8, Math.min(64, Math.floor(65536 / given.length))); // more values take longer
  const runner = runnerFor("around", each * particles);
  const images = [];
  let [shown, few] = [0, 0];
  while (images.length < count) {
    runner.resize(each);
    runner.setGuidance(guidance);
    runner.start(seed, images.length, label);
    runner.keep(particles, given);
    while (runner.draw() < runner.values) {
      const now = performance.now();
      if (now - shown > 100) {
        shown = now;
        yield { images: [...images, runner.pick().pixels], done: false };
      } else yield;
    }
    const { pixels, fewest } = runner.pick();
    images.push(pixels);
    few += fewest < FEW;
    const rate = (1000 * images.length) / (performance.now() - began);
    yield { images, done: images.length === count, rate, particles, few };
  }
}

function* drawAll(runner, { began, from }) {
  let shown = 0;
  for (let done = false; !done; ) {
    if (runner.known < runner.values) runner.draw(); // if all values were given, there is nothing to draw
    const now = performance.now();
    done = runner.known === runner.values;
    const drawn = (runner.images * (runner.known - from)) / runner.values;
    if (done || now - shown > 30) {
      shown = now;
      yield { images: runner.allPixels(), done, rate: (1000 * drawn) / (now - began) };
    } else yield;
  }
}

const channel = new MessageChannel();
const pause = () =>
  new Promise((resume) => {
    channel.port1.onmessage = resume;
    channel.port2.postMessage(null);
  });

async function perform(id, job) {
  let began = performance.now();
  for (const message of job) {
    if (message) postMessage({ id, ...message });
    if (performance.now() - began > SLICE) {
      await pause();
      began = performance.now();
    }
    if (id !== current) return;
  }
}

onmessage = async ({ data: { id, job, ...details } }) => {
  current = id;
  try {
    if (job === "load") {
      engine = await startEngine(details.wasm);
      programs.model = details.program;
      const { channels, bands, height, width, levels, classes, values, layers } = runnerFor("inspect");
      postMessage({ id, channels, bands, height, width, levels, classes, values, layers });
    } else if (job) await perform(id, JOBS[job](details));
  } catch (error) {
    const stopped = "The engine has stopped, perhaps because memory ran out. Please reload the page.";
    postMessage({ id, error: error instanceof WebAssembly.RuntimeError ? stopped : error.message });
  }
};
