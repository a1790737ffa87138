// The view "Draw": a board with a drawing or a picture, which the model completes.

import { limit } from "./frame.js";
import { complain, find } from "./load.js";
import { readPicture } from "./look.js";
import { addCanvases, cssColour, nameColour, paintImage, saveImages } from "./paint.js";
import { Pixels } from "./pixels.js";
import { offerClasses } from "./sample.js";
import { Strokes } from "./strokes.js";

const COUNT = 6;

export function setUpDraw(engine, shape, model) {
  const [canvas, line, below] = [find("board"), find("line"), find("below")];
  const aspect = shape.width / shape.height;
  const colours = shape.bands > 1;
  const board = colours ? new Pixels(shape, model.look) : new Strokes(shape, model.look.frame);
  let at = 0.45; // the place of the line, from 0 at the top to 1
  const pen = { x: (Math.floor(shape.width / 2) + 0.5) / shape.height, y: 0.25, down: false, shown: false };
  let seed = 1, sent = null, busy = false, wanted = false;
  let drawing = false, erased = false; // whether the pen or the eraser draws now, and the eraser has been used
  let example = 0, empty = colours; // the number of the sample on the board, and whether it is still to be drawn
  let shown = []; // the finished completions
  let tries = 1; // times the usual number of particles

  canvas.style.aspectRatio = aspect;
  const canvases = addCanvases(find("completions"), shape, COUNT, "Completion");
  const chooseClass = offerClasses(find("draw-class"), shape, model, model.optional_class ? "any" : null);

  function paint() {
    board.paint(canvas);
    if (pen.shown) {
      const context = canvas.getContext("2d");
      context.fillStyle = pen.down ? "#ff8a3d" : "#ff8a3d90";
      context.beginPath();
      context.arc(pen.x * canvas.clientHeight, pen.y * canvas.clientHeight, 8, 0, 7);
      context.fill();
    }
    line.style.top = below.style.top = `${100 * at}%`;
    line.setAttribute("aria-valuemin", 0);
    line.setAttribute("aria-valuemax", shape.height);
    line.setAttribute("aria-valuenow", Math.round(at * shape.height));
  }

  // A new request waits until the last one has shown its first rows, so that they appear even while one draws.
  function ask(anyway = false) {
    if (empty) return;
    if (busy) return void (wanted = true);
    wanted = false;
    const { values, kept } = board.read(at);
    const given = values.map((value, n) => (kept[Math.floor(n / shape.channels)] ? value : -1));
    const job = { job: "complete", given, seed, count: COUNT, tries, ...chooseClass() };
    const key = JSON.stringify(job);
    if (key === sent && !anyway) return;
    sent = key;
    busy = true;
    find("completions").ariaBusy = true;
    find("few").hidden = find("draw-save").hidden = true;
    engine.run(job, ({ images, done, rate, particles, few }) => {
      images.forEach((image, n) => paintImage(canvases[n], shape, image, kept));
      canvases.forEach((canvas, n) => canvas.classList.toggle("old", n >= images.length));
      const speed = done && kept.includes(false) ? `${Number(rate.toPrecision(2))} images/s in this browser` : "";
      find("draw-speed").textContent = done ? speed : `drawing ${images.length} of ${COUNT} …`;
      busy = false;
      if (done) {
        find("completions").ariaBusy = false;
        find("few").hidden = !few;
        [shown, find("draw-save").hidden] = [images, false];
        find("few-said").textContent = `Few of ${particles} tries fit what is kept, in ${few} of ${COUNT} completions.`;
        find("tries").hidden = tries > 1;
      }
      if (wanted) ask();
    });
  }
  function change() {
    [empty, tries] = [false, 1];
    paint();
    ask();
  }

  const inside = ([x, y]) => [limit(x, 0, aspect), limit(y, 0, 1)];
  function add(place, begin) {
    if (begin) drawing = !(empty && board.tool === "eraser"); // there is nothing to erase yet
    if (!drawing) return;
    if (begin && board.tool === "eraser" && !erased) [erased, at] = [true, 1]; // the rest is to stay
    if (begin) board.begin(inside(place));
    else board.extend(inside(place));
    change();
  }
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.height, (event.clientY - box.top) / box.height];
  };
  canvas.onpointerdown = (event) => {
    if (!event.isPrimary || event.button) return;
    canvas.setPointerCapture(event.pointerId);
    pen.shown = false;
    add(place(event), true);
  };
  canvas.onpointermove = (event) => {
    if (!canvas.hasPointerCapture(event.pointerId)) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const point of events.length ? events : [event]) add(place(point), false);
  };
  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  canvas.onkeydown = (event) => {
    if (event.key in STEPS) {
      pen.shown = true;
      const [across, down] = STEPS[event.key];
      [pen.x, pen.y] = inside([pen.x + across / shape.height, pen.y + down / shape.height]);
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
  canvas.onblur = () => {
    pen.shown = pen.down = false;
    paint();
  };

  const moveLine = (y) => {
    [at, tries] = [limit(y, 0, 1), 1];
    paint();
    ask();
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
    board.undo();
    change();
  };
  find("clear").onclick = () => {
    board.clear();
    change();
  };
  find("more").onclick = () => {
    seed++;
    ask();
  };
  find("draw-save").onclick = () => saveImages(shape, shown, COUNT / 2, `${model.name.split("/").pop()}-completed.png`);
  find("tries").onclick = () => {
    tries = 4;
    ask();
  };
  find("draw-class").onchange = () => ask();
  new ResizeObserver(paint).observe(canvas);

  // Puts a sample of the model on the board, row by row.
  function takeSample() {
    [empty, tries] = [true, 1];
    busy = wanted = false;
    find("completions").ariaBusy = find("few").hidden = true;
    find("draw-speed").textContent = "drawing a sample to begin with …";
    // With a class, a sample is clearer: one class after another, unless one is chosen.
    const ofClass = chooseClass(shape.classes ? example % shape.classes : null);
    engine.run({ job: "sample", seed: example, count: 1, temperature: 1, ...ofClass }, ({ images, done }) => {
      board.put(images[0]);
      paint();
      empty = !done;
      if (done) ask(true);
    });
  }

  async function takePicture(file) {
    if (!file || find("draw").hidden) return;
    try {
      const pixels = await readPicture(file, shape, model.look);
      board.take(pixels);
      change();
      document.body.dataset.pictures = Number(document.body.dataset.pictures ?? 0) + 1;
    } catch (error) {
      complain(error.message);
    }
  }

  const own = model.look.frame ? "a photograph of a drawing" : "a picture";
  const begin = colours ? `Begin with this sample, or open ${own}` : `Draw, or open ${own}`;
  find("draw-lead").textContent = `${begin}. The model draws what is below the line or erased.`;
  for (const id of ["pick", "camera"]) {
    find(id).onclick = () => {
      find("file").toggleAttribute("capture", id === "camera");
      find("file").click();
    };
  }
  find("file").onchange = () => {
    takePicture(find("file").files[0]);
    find("file").value = ""; // so that the same file can be opened again
  };
  document.ondragover = (event) => event.preventDefault();
  document.ondrop = (event) => {
    event.preventDefault(); // the browser would leave the page and show the file
    takePicture(event.dataTransfer.files[0]);
  };
  document.onpaste = ({ clipboardData }) => takePicture(clipboardData.files[0]);
  find("example").hidden = !colours;
  find("example").onclick = () => {
    board.remember();
    example++;
    takeSample();
  };
  find("tool").hidden = board.tool === "eraser"; // the only tool
  find("tool").onchange = ({ target }) => (board.tool = target.value);
  if (model.look.palette.length) {
    find("fill").hidden = false;
    addColours(find("colours"), model.look.palette, board.colour);
    find("colours").onchange = ({ target }) => {
      board.colour = Number(target.value);
      if (board.tool === "eraser") find("tool").querySelector("[value=pencil]").click();
    };
  }

  return {
    show() {
      paint();
      busy = false;
      if (empty) takeSample();
      else ask(true);
    },
  };
}

/** Adds a button for every colour of a palette. */
function addColours(parent, palette, chosen) {
  palette.forEach((colour, value) => {
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "colour", value, checked: value === chosen });
    input.title = nameColour(colour);
    input.setAttribute("aria-label", input.title);
    input.style.setProperty("--colour", cssColour(colour));
    parent.append(input);
  });
}
