// The board of a grey model: strokes of a pen, which are brought into the frame of the training images.

import { fit, penWidth, trace } from "./frame.js";
import { ERASED, paintImage, sheet, themeColour } from "./paint.js";

// A 2, whose upper half could also be that of a 3, 7, 8 or 9.
const EXAMPLE = [
  [0.34, 0.33], [0.37, 0.24], [0.45, 0.18], [0.55, 0.18], [0.63, 0.24], [0.65, 0.33], [0.6, 0.45], [0.52, 0.56],
  [0.43, 0.67], [0.35, 0.79], [0.35, 0.8], [0.45, 0.79], [0.58, 0.79], [0.68, 0.8],
];

/** A board has a height of 1; places on it are [x, y]. A picture is a stroke without points that covers all before it. */
export class Strokes {
  constructor(shape, frame) {
    Object.assign(this, { shape, frame, strokes: [EXAMPLE], untouched: true, tool: "pencil" });
  }

  begin(place) {
    const erases = this.tool === "eraser";
    if (this.untouched && !erases) this.strokes = [];
    this.untouched = false;
    this.strokes.push(Object.assign([place], { erases }));
  }

  extend(place) {
    if (this.strokes.at(-1)?.length) this.strokes.at(-1).push(place);
    else this.begin(place); // the drawing was cleared or replaced under the pen
  }

  /** Takes over the brightnesses of a picture. */
  take(picture) {
    this.strokes = [...(this.untouched ? [] : this.strokes), Object.assign([], { picture })];
    this.untouched = false;
  }

  /** The last picture, or null, and the strokes on it. */
  get drawing() {
    const last = this.strokes.findLastIndex(({ picture }) => picture);
    return { paper: this.strokes[last]?.picture ?? null, strokes: this.strokes.slice(last + 1) };
  }

  undo() {
    this.strokes = this.strokes.slice(0, -1);
  }

  clear() {
    [this.strokes, this.untouched] = [[], false];
  }

  paint(canvas) {
    const { shape, frame } = this;
    const { context, width, height } = sheet(canvas);
    const { paper, strokes } = this.drawing;
    const dark = frame?.ground !== 255;
    context.fillStyle = dark ? themeColour("--ground") : "#fff";
    context.fillRect(0, 0, width, height);
    if (paper) {
      const small = new OffscreenCanvas(shape.width, shape.height);
      paintImage(small, shape, paper);
      context.imageSmoothingEnabled = false;
      context.drawImage(small, 0, 0, width, height);
    }
    if (frame) { // the box that a drawing fills
      const side = (frame.box / shape.height) * height;
      context.strokeStyle = dark ? "#ffffff22" : "#00000022";
      context.setLineDash([4, 6]);
      context.strokeRect((width - side) / 2, (height - side) / 2, side, side);
      context.setLineDash([]);
    }
    const ink = this.untouched ? (dark ? "#ffffffb0" : "#000000b0") : dark ? "#fff" : "#000";
    trace(context, strokes, { scale: height, x: 0, y: 0 }, (penWidth(shape, frame) / shape.height) * height, (erases) => {
      context.strokeStyle = erases ? ERASED : ink;
    });
  }

  /** The values of the image, and for each pixel whether it is kept: above the line, and not erased. */
  read(line) {
    const { paper, strokes } = this.drawing;
    const { pixels, kept } = fit(strokes, paper, line, this.shape, this.frame);
    return { values: pixels.map((brightness) => Math.floor((brightness * this.shape.levels) / 256)), kept };
  }
}
