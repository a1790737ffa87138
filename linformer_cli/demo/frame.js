// Brings a drawing into the frame of the images that the model was trained on.

/** A place in the image is `scale` times a place on the board plus (x, y); the height of the board is 1. */
const AS_DRAWN = (shape) => ({ scale: shape.height, x: 0, y: 0 });

export const limit = (number, low, high) => Math.max(low, Math.min(high, number));

/** The smallest and the largest numbers of points [x, y]. */
function bounds(points) {
  const [xs, ys] = [points.map((point) => point[0]), points.map((point) => point[1])];
  return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
}

/** Draws strokes as lines of `pen` pixels. Returns the share of ink of every pixel, from 0 to 1; or with `erased`, of what
 * the eraser took away after the pen. */
function ink(strokes, shape, place, pen, erased = false) {
  const canvas = new OffscreenCanvas(shape.width, shape.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  trace(context, strokes, place, pen, (erases) => {
    context.globalCompositeOperation = erases === erased ? "source-over" : "destination-out";
  });
  const { data } = context.getImageData(0, 0, shape.width, shape.height);
  return Float32Array.from({ length: shape.width * shape.height }, (_, n) => data[4 * n + 3] / 255);
}

/** Draws strokes on any canvas, with a pen of that width and an eraser that is wider. A stroke is an array of points;
 * `prepare` is called before each one, with whether it erases. */
export function trace(context, strokes, { scale, x, y }, pen, prepare) {
  Object.assign(context, { lineCap: "round", lineJoin: "round" });
  for (const stroke of strokes) {
    context.lineWidth = stroke.erases ? ERASER * pen : pen;
    prepare(stroke.erases === true);
    const points = stroke.map((point) => [point[0] * scale + x, point[1] * scale + y]);
    context.beginPath();
    context.moveTo(points[0][0] - 0.01, points[0][1]); // a single point is a dot
    // Curves from the middle of each piece to the middle of the next one.
    points.forEach((point, n) => {
      const next = points[n + 1] ?? point;
      context.quadraticCurveTo(...point, (point[0] + next[0]) / 2, (point[1] + next[1]) / 2);
    });
    context.stroke();
  }
}

const ERASER = 1.6; // times the width of the pen

/** The width of the pen in pixels of the image. */
export const penWidth = (shape, frame) => (frame ? frame.box / 8 : shape.height / 11);

/** The image of a drawing on `paper`, its brightnesses, and for each pixel whether it is kept: above the line, and not
 * erased.
 *
 * If a quarter of a drawing on plain paper, which is null, is below the line, the drawing is taken for a whole one: it is
 * scaled to the frame's box, and its centre of mass is moved to the frame's. Otherwise it stays where it is.
 */
export function fit(strokes, paper, line, shape, frame) {
  const pen = penWidth(shape, frame);
  let place = AS_DRAWN(shape);
  const points = strokes.filter(({ erases }) => !erases).flat();
  const box = points.length ? bounds(points) : null;
  let found = ink(strokes, shape, place, pen);
  if (frame && box && !paper && box.bottom - line > (box.bottom - box.top) / 4) {
    const scale = Math.min((frame.box - pen) / Math.max(box.right - box.left, box.bottom - box.top, 0.15), 2 * shape.height);
    place = centred(box, scale, (box.left + box.right) / 2, (box.top + box.bottom) / 2, [shape.height / 2, shape.width / 2], pen, shape);
    const [y, x] = massCentre(ink(strokes, shape, place, pen), shape);
    place = centred(box, scale, (x - place.x) / scale, (y - place.y) / scale, frame.centre, pen, shape);
    found = ink(strokes, shape, place, pen);
  }
  const [ground, full] = frame ? [frame.ground, Math.abs(frame.ground - frame.ink)] : [0, 255];
  const pixels = Array.from(found, (share, n) => {
    const below = paper?.[n] ?? ground;
    return Math.round(below + (full - below) * share);
  });
  const row = limit(Math.round(line * place.scale + place.y), 0, shape.height);
  const erased = ink(strokes, shape, place, pen, true);
  return { pixels, kept: pixels.map((_, n) => n < row * shape.width && erased[n] < 0.5) };
}

/** The place at which the point (x, y) of the board falls on `centre`, as far as the whole box fits into the image. */
function centred(box, scale, x, y, [row, column], pen, shape) {
  return {
    scale,
    x: limit(column - x * scale, pen / 2 - box.left * scale, shape.width - pen / 2 - box.right * scale),
    y: limit(row - y * scale, pen / 2 - box.top * scale, shape.height - pen / 2 - box.bottom * scale),
  };
}

export function massCentre(shares, { width }) {
  let [mass, row, column] = [1e-9, 0, 0];
  shares.forEach((share, n) => {
    mass += share;
    row += share * (Math.floor(n / width) + 0.5);
    column += share * ((n % width) + 0.5);
  });
  return [row / mass, column / mass];
}
