// The view "Draw": a drawing that the model completes.

import { fit, penWidth, trace } from "./frame.js";
import { addCanvases, paintImage, sheet, themeColour } from "./paint.js";

const COUNT = 6;
// A 2, whose upper half could also be that of a 3, 7, 8 or 9.
const EXAMPLE = [
  [0.34, 0.33], [0.37, 0.24], [0.45, 0.18], [0.55, 0.18], [0.63, 0.24], [0.65, 0.33], [0.6, 0.45], [0.52, 0.56],
  [0.43, 0.67], [0.35, 0.79], [0.35, 0.8], [0.45, 0.79], [0.58, 0.79], [0.68, 0.8],
];

export function setUpDraw(engine, shape, frame) {
  const find = (id) => document.getElementById(id);
  const [board, line, below] = [find("board"), find("line"), find("below")];
  const aspect = shape.width / shape.height;
  let strokes = [EXAMPLE], untouched = true;
  let at = 0.45; // the place of the line, from 0 at the top to 1
  let pen = { x: aspect / 2, y: 0.25, down: false, shown: false };
  let seed = 1, sent = null, busy = false, wanted = false;

  board.style.aspectRatio = aspect;
  const canvases = addCanvases(find("completions"), shape, COUNT, "Completion");

  function paint() {
    const { context, width, height } = sheet(board);
    const dark = frame?.ground !== 255;
    context.fillStyle = dark ? themeColour("--ground") : "#fff";
    context.fillRect(0, 0, width, height);
    if (frame) { // the box that a drawing fills
      const side = (frame.box / shape.height) * height;
      context.strokeStyle = dark ? "#ffffff22" : "#00000022";
      context.setLineDash([4, 6]);
      context.strokeRect((width - side) / 2, (height - side) / 2, side, side);
      context.setLineDash([]);
    }
    Object.assign(context, { lineWidth: (penWidth(shape, frame) / shape.height) * height, lineCap: "round", lineJoin: "round" });
    context.strokeStyle = untouched ? (dark ? "#ffffffb0" : "#000000b0") : dark ? "#fff" : "#000";
    trace(context, strokes, { scale: height, x: 0, y: 0 });
    if (pen.shown) {
      context.fillStyle = pen.down ? "#ff8a3d" : "#ff8a3d90";
      context.beginPath();
      context.arc(pen.x * height, pen.y * height, 8, 0, 7);
      context.fill();
    }
    line.style.top = below.style.top = `${100 * at}%`;
    line.setAttribute("aria-valuemin", 0);
    line.setAttribute("aria-valuemax", shape.height);
    line.setAttribute("aria-valuenow", Math.round(at * shape.height));
  }

  // A new request waits until the last one has shown its first rows, so that they appear even while one draws.
  function ask(anyway = false) {
    if (busy) return void (wanted = true);
    wanted = false;
    const { pixels, row } = fit(strokes, at, shape, frame);
    const kept = [];
    for (const brightness of pixels.slice(0, row * shape.width)) {
      for (let n = 0; n < shape.channels; n++) kept.push(Math.floor((brightness * shape.levels) / 256));
    }
    const key = `${seed} ${kept}`;
    if (key === sent && !anyway) return;
    sent = key;
    busy = true;
    find("completions").ariaBusy = true;
    const began = performance.now();
    engine.run({ job: "complete", kept, seed, count: COUNT }, ({ images, known, done, rate }) => {
      images.forEach((image, n) => paintImage(canvases[n], shape, image, kept.length));
      if (busy) document.body.dataset.answer = Math.round(performance.now() - began);
      const speed = kept.length < known ? `${rate.toFixed(1)} images/s in this browser` : "";
      find("draw-speed").textContent = done ? speed : "drawing …";
      busy = false;
      if (done) find("completions").ariaBusy = false;
      if (wanted) ask();
    });
  }
  function change() {
    paint();
    ask();
  }

  function add(point, begin) {
    if (untouched) strokes = [];
    untouched = false;
    const inside = [Math.max(0, Math.min(aspect, point[0])), Math.max(0, Math.min(1, point[1]))];
    if (begin || !strokes.length) strokes.push([inside]);
    else strokes.at(-1).push(inside);
    change();
  }
  const place = (event) => {
    const box = board.getBoundingClientRect();
    return [(event.clientX - box.left) / box.height, (event.clientY - box.top) / box.height];
  };
  board.onpointerdown = (event) => {
    if (!event.isPrimary || event.button) return;
    board.setPointerCapture(event.pointerId);
    pen.shown = false;
    add(place(event), true);
  };
  board.onpointermove = (event) => {
    if (!board.hasPointerCapture(event.pointerId)) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const point of events.length ? events : [event]) add(place(point), false);
  };
  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  board.onkeydown = (event) => {
    if (event.key in STEPS) {
      pen.shown = true;
      pen.x = Math.max(0, Math.min(aspect, pen.x + STEPS[event.key][0] / shape.height));
      pen.y = Math.max(0, Math.min(1, pen.y + STEPS[event.key][1] / shape.height));
      if (pen.down) add([pen.x, pen.y], false);
    } else if (event.key === " ") {
      pen.shown = true;
      pen.down = !pen.down;
      if (pen.down) add([pen.x, pen.y], true);
    } else if (event.key === "Backspace") find("undo").click();
    else return;
    event.preventDefault();
    paint();
  };
  board.onblur = () => {
    pen.shown = pen.down = false;
    paint();
  };

  const moveLine = (y) => {
    at = Math.max(0, Math.min(1, y));
    change();
  };
  line.onpointerdown = (event) => line.setPointerCapture(event.pointerId);
  line.onpointermove = (event) => line.hasPointerCapture(event.pointerId) && moveLine(place(event)[1]);
  line.onkeydown = (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1, PageUp: -4, PageDown: 4, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    moveLine(at + step / shape.height);
  };

  find("undo").onclick = () => {
    strokes = strokes.slice(0, -1);
    change();
  };
  find("clear").onclick = () => {
    [strokes, untouched] = [[], false];
    change();
  };
  find("more").onclick = () => {
    seed++;
    ask();
  };
  new ResizeObserver(paint).observe(board);

  return {
    show() {
      paint();
      busy = false;
      ask(true);
    },
  };
}
