// The board of a model of colours: a picture, an eraser, and a pencil and a bucket if there is a palette.

import { limit } from "./frame.js";
import { createFinder } from "./look.js";
import { ERASED, paintImage, sheet } from "./paint.js";

const MOST_UNDO = 100;
const LEAST_CELL = 8; // the width of a pixel on the screen, from which on lines are drawn between pixels

/** The pixels are RGBA. With a palette, each has one of its colours. Places on the board are [x, y]; its height is 1. */
export class Pixels {
  constructor(shape, look) {
    const size = shape.width * shape.height;
    Object.assign(this, { shape, palette: look.palette, tool: "eraser", past: [] });
    Object.assign(this, { pixels: new Uint8ClampedArray(4 * size), erased: new Uint8Array(size) });
    if (this.palette.length) {
      this.tool = "pencil";
      this.find = createFinder(this.palette);
      this.colour = this.palette.map(([, , , opacity]) => opacity === 255).lastIndexOf(true);
    }
    this.fill(() => this.ground);
  }

  get ground() {
    return this.palette[0] ?? [0, 0, 0, 255];
  }

  /** Changes all pixels. `colour(n)` gives the colour of pixel number n. */
  fill(colour) {
    this.erased.fill(0);
    for (let n = 0; n < this.pixels.length / 4; n++) this.pixels.set(colour(n), 4 * n);
  }

  at(n) {
    return this.pixels.subarray(4 * n, 4 * n + 4);
  }

  remember() {
    this.past = [...this.past, [this.pixels.slice(), this.erased.slice()]].slice(-MOST_UNDO);
  }

  undo() {
    [this.pixels, this.erased] = this.past.pop() ?? [this.pixels, this.erased];
  }

  clear() {
    this.remember();
    this.fill(() => this.ground);
  }

  /** Shows the pixels of an image or a picture, with 3 or 4 bands. */
  put(pixels) {
    const bands = pixels.length / (this.shape.width * this.shape.height);
    this.fill((n) => {
      const colour = [...pixels.subarray(bands * n, bands * (n + 1)), 255].slice(0, 4);
      return this.find ? this.palette[this.find(colour)] : colour;
    });
  }

  /** Takes over the pixels of a picture. */
  take(pixels) {
    this.remember();
    this.put(pixels);
  }

  begin(place) {
    this.remember();
    this.last = this.locate(place);
    if (this.tool === "fill") this.flood(this.last);
    else this.extend(place);
  }

  extend(place) {
    if (this.tool === "fill") return;
    const [[x, y], [toX, toY]] = [this.last, (this.last = this.locate(place))];
    const steps = Math.max(1, Math.abs(toX - x), Math.abs(toY - y));
    for (let n = 0; n <= steps; n++) {
      const [column, row] = [Math.round(x + ((toX - x) * n) / steps), Math.round(y + ((toY - y) * n) / steps)];
      if (this.tool === "eraser") this.erase(column, row);
      else this.colourIn(row * this.shape.width + column);
    }
  }

  colourIn(n) {
    this.pixels.set(this.palette[this.colour], 4 * n);
    this.erased[n] = 0;
  }

  /** Erases a pixel and its neighbours. */
  erase(column, row) {
    const { width, height } = this.shape;
    for (let y = Math.max(0, row - 1); y <= Math.min(height - 1, row + 1); y++) {
      this.erased.fill(1, y * width + Math.max(0, column - 1), y * width + Math.min(width - 1, column + 1) + 1);
    }
  }

  /** The column and row of a place. */
  locate([x, y]) {
    const { width, height } = this.shape;
    return [limit(Math.floor(x * height), 0, width - 1), limit(Math.floor(y * height), 0, height - 1)];
  }

  /** Gives the colour to a pixel and to all of the same colour that are connected to it. */
  flood([column, row]) {
    const { width, height } = this.shape;
    const old = String(this.at(row * width + column));
    if (old === String(this.palette[this.colour])) return;
    const waiting = [[column, row]];
    while (waiting.length) {
      const [x, y] = waiting.pop();
      const n = y * width + x;
      if (x < 0 || y < 0 || x >= width || y >= height || String(this.at(n)) !== old) continue;
      this.colourIn(n);
      waiting.push([x - 1, y], [x + 1, y], [x, y - 1], [x, y + 1]);
    }
  }

  paint(canvas) {
    const { context, width, height } = sheet(canvas);
    const small = new OffscreenCanvas(this.shape.width, this.shape.height);
    paintImage(small, { ...this.shape, bands: 4 }, this.pixels);
    const marks = small.getContext("2d");
    marks.fillStyle = ERASED;
    this.erased.forEach((yes, n) => yes && marks.fillRect(n % small.width, Math.floor(n / small.width), 1, 1));
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, width, height);
    const cell = height / this.shape.height;
    if (!this.find || cell < LEAST_CELL) return;
    context.fillStyle = "#80808050";
    for (let n = 1; n < this.shape.width; n++) context.fillRect(n * cell, 0, 1, height);
    for (let n = 1; n < this.shape.height; n++) context.fillRect(0, n * cell, width, 1);
  }

  /** The values of the image, and for each pixel whether it is kept: above the line, and not erased. */
  read(line) {
    const { width, height, channels, levels } = this.shape;
    const row = Math.round(line * height);
    const numbers = Array.from({ length: width * height }, (_, n) => n);
    const level = (brightness) => Math.floor((brightness * levels) / 256);
    return {
      values: numbers.flatMap((n) => (this.find ? this.find(this.at(n)) : Array.from(this.at(n).subarray(0, channels), level))),
      kept: numbers.map((n) => n < row * width && !this.erased[n]),
    };
  }
}
