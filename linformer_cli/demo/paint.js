// Pixels, colours and plots on canvases.

/** What is erased, and the model draws. */
export const ERASED = "#a3521f";
/** Black to orange: what the model drew. */
export const drawn = (v) => [Math.min(255, v * 1.2), v * 0.6, v * 0.26];
/** Black over violet to yellow, for amounts from 0 to 1. */
export const heat = (a) => [255 * Math.min(1, 1.7 * a), 235 * a * a, 150 * Math.sin(Math.PI * Math.min(1, a * 1.15)) ** 2];
/** Blue over black to orange, for numbers from -1 to 1. */
export const signed = (a) => (a < 0 ? [-70 * a, -165 * a, -255 * a] : [255 * a, 145 * a, 60 * a]);

/** The name of a colour of a palette [red, green, blue, opacity], and its form in style.css. */
export const nameColour = ([red, green, blue, opacity]) =>
  opacity ? `#${[red, green, blue].map((band) => band.toString(16).padStart(2, "0")).join("")}` : "transparent";
export const cssColour = ([red, green, blue, opacity]) => `rgb(${red} ${green} ${blue} / ${opacity / 255})`;

/** Paints rows x columns dots on a canvas. `colour(row, column)` gives red, green and blue from 0 to 255. */
export function paintDots(canvas, rows, columns, colour) {
  if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
  const picture = new ImageData(columns, rows);
  for (let n = 0; n < rows * columns; n++) {
    picture.data.set(colour(Math.floor(n / columns), n % columns), 4 * n);
    picture.data[4 * n + 3] = 255;
  }
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

/** The colour of a pixel of an image, transparent ones on a checkerboard; a grey pixel that is not `kept` gets the colour
 * of what the model drew. */
export function pixelColour(shape, pixels, row, column, kept = true) {
  const at = (row * shape.width + column) * shape.bands;
  if (shape.bands === 1) return kept ? [pixels[at], pixels[at], pixels[at]] : drawn(pixels[at]);
  const ground = ((row >> 1) + (column >> 1)) % 2 ? 144 : 112;
  const opacity = shape.bands === 4 ? pixels[at + 3] / 255 : 1;
  return [0, 1, 2].map((band) => ground + (pixels[at + band] - ground) * opacity);
}

/** Paints an image. `kept` says for each pixel whether the model was given it. */
export function paintImage(canvas, shape, pixels, kept) {
  paintDots(canvas, shape.height, shape.width, (row, column) =>
    pixelColour(shape, pixels, row, column, kept?.[row * shape.width + column]));
}

/** Paints images side by side, with a gap of one pixel, in the colour of the page. */
export function paintGrid(canvas, shape, images, columns) {
  const [height, width] = [shape.height + 1, shape.width + 1];
  paintDots(canvas, Math.ceil(images.length / columns) * height - 1, columns * width - 1, (row, column) => {
    const image = images[Math.floor(row / height) * columns + Math.floor(column / width)];
    const [y, x] = [row % height, column % width];
    if (!image || y === shape.height || x === shape.width) return [70, 72, 80];
    return pixelColour(shape, image, y, x);
  });
}

/** Lets the browser save images side by side as an enlarged PNG. */
export function saveImages(shape, images, columns, name) {
  const small = document.createElement("canvas");
  paintGrid(small, shape, images, columns);
  const factor = Math.max(1, Math.round(1000 / small.width));
  const large = Object.assign(document.createElement("canvas"), { width: small.width * factor, height: small.height * factor });
  const context = large.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, large.width, large.height);
  large.toBlob((blob) => {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

/** Adds canvases for images to an element. */
export function addCanvases(parent, shape, count, label) {
  return Array.from({ length: count }, (_, n) => {
    const canvas = Object.assign(document.createElement("canvas"), { className: "pixels", width: shape.width, height: shape.height });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${label} ${n + 1}`);
    parent.append(canvas);
    return canvas;
  });
}

/** Prepares a canvas for lines and text in the units of the page. Returns its context, width and height. */
export function sheet(canvas) {
  const [width, height, ratio] = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio];
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "13px system-ui, sans-serif";
  return { context, width, height };
}

/** Writes 0 and the last number below an axis. */
export function labelAxis(context, left, right, y, last) {
  context.fillText("0", left, y);
  context.fillText(last, right - context.measureText(last).width, y);
}

/** A colour of style.css, such as "--accent". */
export const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

export const formatBytes = (bytes) => (bytes < 1e6 ? `${Math.round(bytes / 1024)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);
