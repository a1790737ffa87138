// Brings a picture to the size and the colours of the model's images, as data/look.py does.

import { findDrawing, frameDrawing } from "./photo.js";

const LONGEST = 1024; // the longer side of a photograph that is searched for a drawing

/** The pixels of a picture file, RGBA or grey [height, width]. If the images have a frame, a picture of another size has to
 * show a drawing. Raises an error if it does not, or if the browser cannot read the file. */
export async function readPicture(file, shape, look) {
  const name = file.name || "This picture";
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${name} is not a picture that this browser can read.`);
  });
  if (look.frame && (picture.width !== shape.width || picture.height !== shape.height)) {
    const scale = Math.min(1, LONGEST / Math.max(picture.width, picture.height));
    const [width, height] = [picture.width, picture.height].map((side) => Math.max(3, Math.round(side * scale)));
    const values = toGrey(drawPicture(picture, { width, height }, { ...look, fit: "stretch" }));
    const drawing = findDrawing({ width, height, values });
    if (!drawing) throw new Error(`${name} shows no drawing on a plain ground.`);
    return frameDrawing(drawing, look.frame, shape);
  }
  const pixels = drawPicture(picture, shape, look);
  return shape.bands === 1 ? toGrey(pixels) : pixels;
}

/** The RGBA pixels of an image of a certain size with a picture. */
function drawPicture(picture, { width, height }, look) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  Object.assign(context, { imageSmoothingEnabled: look.smooth, imageSmoothingQuality: "high" });
  const place = findPlace(picture, { width, height }, look);
  context.drawImage(picture, ...place);
  if (!look.keeps_opacity) {
    context.fillStyle = look.ground ?? chooseGround(context, place);
    context.globalCompositeOperation = "destination-over";
    context.fillRect(0, 0, width, height);
  }
  return context.getImageData(0, 0, width, height).data;
}

/** The brightnesses of RGBA pixels. */
const toGrey = (pixels) => Float32Array.from({ length: pixels.length / 4 }, (_, n) =>
  Math.round(0.299 * pixels[4 * n] + 0.587 * pixels[4 * n + 1] + 0.114 * pixels[4 * n + 2]));

/** Where a picture is drawn: left, top, width and height in pixels of the image. */
function findPlace(picture, { width, height }, { fit, smooth }) {
  if (fit === "stretch") return [0, 0, width, height];
  const ratios = [width / picture.width, height / picture.height];
  const [inside, around] = [Math.min(...ratios), Math.max(...ratios)];
  // Pixel art is not enlarged. To become smaller, it loses whole rows and columns.
  const whole = !smooth && (fit === "crop" || inside > 1) ? Math.max(1, Math.floor(1 / around)) : null;
  const scaled = (side) => (whole ? Math.floor(side / whole) : Math.round(side * (fit === "pad" ? inside : around)));
  const [wide, tall] = [scaled(picture.width), scaled(picture.height)];
  return [Math.floor((width - wide) / 2), Math.floor((height - tall) / 2), wide, tall];
}

/** The colour of the picture's corner, or if that is transparent, whichever of black and white the picture stands out on. */
function chooseGround(context, [left, top]) {
  const [red, green, blue, opacity] = context.getImageData(Math.max(0, left), Math.max(0, top), 1, 1).data;
  if (opacity === 255) return `rgb(${red} ${green} ${blue})`;
  const { data } = context.getImageData(0, 0, context.canvas.width, context.canvas.height);
  let [light, mass] = [0, 1];
  for (let n = 0; n < data.length; n += 4) {
    light += ((data[n] + data[n + 1] + data[n + 2]) / 3) * data[n + 3];
    mass += data[n + 3];
  }
  return light > 127 * mass ? "#000" : "#fff";
}

/** Returns a function that gives the number of the nearest colour of a palette for a colour [red, green, blue, opacity].
 * Colours are compared as they look on black and by their opacity. */
export function createFinder(palette) {
  const weigh = ([red, green, blue, opacity]) => [red, green, blue, 255].map((band) => (band * opacity) / 255);
  const known = palette.map(weigh);
  const found = new Map();
  return (colour) => {
    const key = String(colour);
    if (!found.has(key)) {
      const own = weigh(colour);
      const distances = known.map((other) => other.reduce((sum, band, n) => sum + (band - own[n]) ** 2, 0));
      found.set(key, distances.indexOf(Math.min(...distances)));
    }
    return found.get(key);
  };
}
