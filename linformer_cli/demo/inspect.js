// The view "Look inside": the state, the next value and the bits, while an image is drawn value by value.

import { find } from "./load.js";
import { cssColour, heat, labelAxis, nameColour, paintDots, paintImage, pixelColour, sheet, signed, themeColour } from "./paint.js";

const MOST_COLUMNS = 8; // of layers

export function setUpInspect(engine, shape, model) {
  // A window of bytes is shown as text, and its bits in rows as if it were an image.
  const side = Math.ceil(Math.sqrt(shape.width));
  const plane = model.text ? { ...shape, width: side, height: Math.ceil(shape.width / side) } : shape;
  const decoder = new TextDecoder();
  find("inside-image").hidden = find("inside-image-caption").hidden = model.text;
  find("inside-text").hidden = !model.text;
  if (model.text) {
    find("restart").textContent = "New text";
    find("inside-each").textContent = "byte";
  }
  const choice = (id) => Number(find(id).value);
  let seed = 0, playing = false, waiting = false, shown = null, before = null;
  // Values per frame, from slow to fast. Below 1, a value takes several frames.
  const SPEEDS = [0.05, 0.25, 1, 4, 14, 56];
  let due = 0;

  const options = (count) => Array.from({ length: count }, (_, n) => new Option(n + 1, n));
  find("layer").append(...options(shape.layers));
  find("head").append(...options(model.heads));
  const palette = model.look.palette;
  find("next-caption").textContent = palette.length
    ? "How likely each next colour is"
    : `How likely each next value is, from 0 to ${shape.levels - 1}`;
  find("state-meaning").hidden = !model.states.length;
  // The layers of a deep model are in several bands, one below the other, so that every tile can be seen and touched.
  const columnsOfLayers = Math.min(shape.layers, MOST_COLUMNS);
  const bands = Math.ceil(shape.layers / columnsOfLayers);
  if (bands > 1) find("all-caption").textContent = `All layers (${columnsOfLayers} side by side, the next ones below) and their heads (rows)`;

  // The numbers of one head of a state, as rows of the width of a value.
  function headOf(states, layer, number, head) {
    const state = states?.[layer]?.[number];
    if (!state) return { numbers: new Float32Array(1), columns: 1 };
    const heads = state.length % model.heads ? 1 : model.heads;
    const size = state.length / heads;
    const first = (heads === 1 ? 0 : head) * size;
    const columns = number === 1 && model.states[1] ? 1 : size % model.head_width ? Math.ceil(Math.sqrt(size)) : model.head_width;
    return { numbers: state.subarray(first, first + size), columns };
  }

  // A head's state, or its last change, as a function of row and column to a colour.
  function picture(layer, number, head) {
    const { numbers, columns } = headOf(shown.states, layer, number, head);
    const old = choice("show") ? headOf(before?.states, layer, number, head).numbers : null;
    const amounts = old?.length === numbers.length ? numbers.map((x, n) => x - old[n]) : numbers;
    let most = 1e-9;
    for (const x of amounts) most = Math.max(most, Math.abs(x));
    const colour = (row, column) => {
      const x = (amounts[row * columns + column] ?? 0) / most;
      return signed(Math.sign(x) * Math.sqrt(Math.abs(x))); // the root makes small numbers visible
    };
    return { rows: Math.ceil(numbers.length / columns), columns, colour, most };
  }

  /** The layer and head of a tile in the picture of all states. */
  const findTile = (column, row) => [Math.floor(row / model.heads) * columnsOfLayers + column, row % model.heads];

  const GAP = [60, 62, 70];
  function paintStates() {
    const [layer, head] = [choice("layer"), choice("head")];
    const main = picture(layer, 0, head);
    const side = model.states[1] ? picture(layer, 1, head) : { rows: 0, columns: -1 };
    const thick = Math.max(1, Math.round(main.columns / 16)); // z is one column; it is shown thicker, beside s
    paintDots(find("inside-state"), main.rows, main.columns + (side.rows ? 2 * thick : 0), (row, column) => {
      if (column < main.columns) return main.colour(row, column);
      return column < main.columns + thick ? GAP : side.colour(row, 0);
    });
    const tiles = Array.from({ length: shape.layers }, (_, layer) => Array.from({ length: model.heads }, (_, head) => picture(layer, 0, head)));
    const { rows, columns } = tiles[0][0];
    paintDots(find("inside-all"), bands * model.heads * (rows + 2), columnsOfLayers * (columns + 2), (row, column) => {
      const [y, x] = [row % (rows + 2), column % (columns + 2)];
      const [l, h] = findTile(Math.floor(column / (columns + 2)), Math.floor(row / (rows + 2)));
      if (!y || !x || y > rows || x > columns) return l === layer && h === head ? [255, 255, 255] : [24, 26, 32];
      return tiles[l]?.[h].colour(y - 1, x - 1) ?? [24, 26, 32];
    });
    find("most").textContent = Number(main.most.toPrecision(2));
    find("least").textContent = `−${find("most").textContent}`;
    const size = main.rows === main.columns ? `${main.rows} × ${main.columns}` : "";
    find("state-caption").textContent = model.states.length
      ? `Layer ${layer + 1}, head ${head + 1}: s (${size}) and, to its right, z`
      : `Layer ${layer + 1}, head ${head + 1}: the state`;
  }

  function paintNext() {
    const { context, width, height } = sheet(find("inside-next"));
    const { probabilities } = shown;
    if (!probabilities) {
      context.fillStyle = themeColour("--quiet");
      return context.fillText(`The ${model.text ? "text" : "image"} is complete.`, 0, height / 2);
    }
    const most = Math.max(...probabilities);
    const bar = width / probabilities.length;
    const base = height - (palette.length ? 1 : 20); // there are numbers below values
    context.strokeStyle = themeColour("--quiet");
    probabilities.forEach((p, n) => {
      const grey = Math.round((55 * n) / probabilities.length) + 30;
      context.fillStyle = palette[n]?.[3] ? cssColour(palette[n]) : p === most ? themeColour("--accent") : `hsl(25 70% ${grey}%)`;
      // The root keeps unlikely values visible.
      const tall = Math.sqrt(p / most) * (base - 16);
      context.fillRect(n * bar, base - tall, Math.max(bar - 0.6, 1), tall);
      if (palette.length) context.strokeRect(n * bar, base - tall, bar - 0.6, tall); // for colours like that of the page
    });
    context.fillStyle = themeColour("--quiet");
    context.fillRect(0, base, width, 1);
    const best = probabilities.indexOf(most);
    const name = palette.length ? nameColour(palette[best]) : best;
    const text = `${name}: ${(100 * most).toFixed(most > 0.995 ? 1 : 0)} %`;
    const at = Math.min(Math.max(0, best * bar - 20), width - context.measureText(text).width);
    context.fillText(text, at, 12);
    if (palette.length) return;
    labelAxis(context, 0, width, height - 5, shape.levels - 1);
  }

  function paint() {
    if (!shown) return;
    const next = Math.floor(shown.known / shape.channels);
    if (model.text) find("inside-text").textContent = decoder.decode(shown.pixels.subarray(0, shown.known));
    paintDots(find("inside-image"), plane.height, plane.width, (row, column) =>
      row * plane.width + column === next ? [255, 138, 61] : pixelColour(plane, shown.pixels, row, column));
    paintDots(find("inside-bits"), plane.height, plane.width, (row, column) => {
      const first = (row * plane.width + column) * shape.channels;
      let sum = 0;
      for (let n = 0; n < shape.channels; n++) sum += shown.bits[first + n] ?? 0;
      return heat(Math.min(1, sum / (8 * shape.channels)));
    });
    find("bits").textContent = Math.round(shown.bits.reduce((sum, x) => sum + x, 0));
    paintStates();
    paintNext();
    find("play").textContent = playing ? "Pause" : "Play";
    find("play").disabled = find("step").disabled = shown.done;
    document.body.dataset.known = shown.known;
  }

  function receive(message) {
    waiting = false;
    [before, shown] = [shown, message];
    if (message.done) playing = false;
    paint();
  }
  function step(count) {
    if (waiting || !shown || shown.done) return;
    waiting = true;
    engine.run({ job: "step", count }, receive);
  }
  function restart(other) {
    seed += other;
    [before, shown, due, waiting] = [null, null, 0, true];
    const label = shape.classes && !model.optional_class ? seed % shape.classes : null; // the classes in turn
    engine.run({ job: "inspect", seed, label }, receive);
  }
  function frame() {
    if (!playing) return;
    due += SPEEDS[choice("speed")];
    if (due >= 1 && !waiting) {
      step(Math.floor(due));
      due = 0;
    }
    requestAnimationFrame(frame);
  }

  function play(yes) {
    playing = yes;
    requestAnimationFrame(frame);
    paint();
  }
  find("play").onclick = () => play(!playing);
  find("step").onclick = () => {
    playing = false;
    step(1);
    paint();
  };
  find("restart").onclick = () => {
    const done = shown?.done;
    restart(1);
    play(playing || done); // a reader who steps goes on stepping
  };
  for (const id of ["layer", "head", "show"]) find(id).onchange = paint;
  find("inside-all").onclick = ({ target, offsetX, offsetY }) => {
    const [column, row] = [(offsetX / target.clientWidth) * columnsOfLayers, (offsetY / target.clientHeight) * bands * model.heads];
    const [layer, head] = findTile(Math.floor(column), Math.floor(row));
    if (layer >= shape.layers) return;
    [find("layer").value, find("head").value] = [layer, head];
    paint();
  };

  for (const id of ["inside-image", "inside-bits"]) paintImage(find(id), plane, new Uint8Array(plane.width * plane.height * plane.bands));
  return {
    show() {
      if (!shown) restart(0);
      play(!shown?.done);
    },
    hide() {
      playing = waiting = false;
    },
  };
}
