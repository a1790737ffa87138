// The C++ engine (native/runner.h), compiled to WebAssembly. This module works in a page, in a worker and in node.

/** Starts the engine from the bytes of engine.wasm. Raises an error that says why if this browser cannot run it. */
export async function startEngine(bytes) {
  if (!WebAssembly.validate(bytes)) {
    throw new Error("This browser cannot run the engine: its WebAssembly has no SIMD. A newer browser has it.");
  }
  const { instance } = await WebAssembly.instantiate(bytes);
  instance.exports._initialize();
  return instance.exports;
}

const LARGEST_SCRATCH = 1 << 18; // bytes for the arguments and results of a call

/** Draws a batch of images value by value. native/runner.h explains the functions. */
export class Runner {
  constructor(engine, file, batch = 1) {
    this.engine = engine;
    this.batch = this.images = batch;
    const place = engine.malloc(file.length);
    if (!place) throw new Error("There is not enough memory for this model.");
    new Uint8Array(engine.memory.buffer, place, file.length).set(file);
    this.runner = engine.lintx_open(place, BigInt(file.length), BigInt(batch));
    engine.free(place);
    if (!this.runner) throw new Error(this.#reason());
    const numbers = this.#array(BigInt64Array, 9);
    engine.lintx_describe(this.scratch, this.runner);
    [this.channels, this.height, this.width, this.levels, this.classes, this.values, , this.layers, this.bands] =
      Array.from(numbers, Number);
    this.known = 0;
  }

  /** Frees the memory of this runner, which must not be used afterwards. */
  close() {
    this.engine.lintx_close(this.runner);
    this.engine.free(this.scratch);
  }

  /** Divides the logarithms of all probabilities by a temperature before values are drawn; 1 changes nothing. */
  setTemperature(temperature) {
    this.#check(this.engine.lintx_filter(this.runner, temperature, 0n, 0));
  }

  /** Lets the images that begin from now on follow their class more closely; 1 changes nothing. With guidance, the batch
   * is twice the number of images: its second half draws the same images without their class. */
  setGuidance(weight) {
    this.#check(this.engine.lintx_guide(this.runner, weight));
    this.images = weight === 1 ? this.batch : this.batch / 2;
  }

  /** Begins images number `first`, first + 1 and so on, all of class `label`. Without it, images have no class if the
   * class is optional, or else the classes in turn. */
  start(seed, first = 0, label = null) {
    const labels = label === null ? 0 : this.#array(BigInt64Array, this.batch).fill(BigInt(label)).byteOffset;
    this.#check(this.engine.lintx_start(this.runner, BigInt(seed), BigInt(first), labels));
    this.known = 0;
  }

  /** Lets every image continue where the only image of `other` is. */
  continueFrom(other) {
    this.#check(this.engine.lintx_continue(this.runner, other.runner));
    this.known = other.known;
  }

  /** Draws the next value of every image, or the next few. Returns the number of known values. */
  draw() {
    this.known = this.#check(this.engine.lintx_draw_next(this.runner));
    return this.known;
  }

  /** Gives every image the same next value. */
  give(value) {
    const values = this.#array(BigInt64Array, this.batch).fill(BigInt(value));
    this.known = this.#check(this.engine.lintx_give_next(this.runner, values.byteOffset));
  }

  /** Lets the image, or the pair with guidance, that has just begun keep the `given` values that are not -1, and draws the
   * others: `particles` images are drawn, and `pick` chooses one. */
  keep(particles, given) {
    const values = this.#array(BigInt64Array, this.values);
    given.forEach((value, n) => (values[n] = BigInt(value)));
    this.#check(this.engine.lintx_keep(this.runner, BigInt(particles), values.byteOffset));
  }

  /** Works on the first `batch` images only. */
  resize(batch) {
    this.#check(this.engine.lintx_resize(this.runner, BigInt(batch)));
  }

  /** One particle, chosen by how well it fits the given values so far: its pixels, and the smallest effective sample size. */
  pick() {
    const image = this.#check(this.engine.lintx_pick(this.runner, this.#array(Float64Array, 3).byteOffset));
    const [, , fewest] = this.#array(Float64Array, 3);
    return { pixels: this.pixels(image), fewest };
  }

  /** The probabilities of the next value of the first image. The next `draw` then draws exactly one value. */
  probabilities() {
    const { byteOffset } = this.#array(Float64Array, this.levels);
    this.#check(this.engine.lintx_probabilities(this.runner, 0n, byteOffset));
    return Float64Array.from(this.#array(Float64Array, this.levels)); // the call may have moved the memory
  }

  /** The number of the last value of the first image. */
  lastValue() {
    const place = this.engine.lintx_values(this.runner, 0n);
    return Number(new BigInt64Array(this.engine.memory.buffer, place, this.values)[this.known - 1]);
  }

  /** The grey, RGB or RGBA pixels of an image, 0 to 255; unknown values are 0. */
  pixels(image = 0) {
    const found = this.#array(Uint8Array, this.height * this.width * this.bands);
    this.engine.lintx_pixels(this.runner, BigInt(image), found.byteOffset);
    return Uint8Array.from(found);
  }

  /** The red, green, blue and opacity of every value, 0 to 255; empty if values are brightnesses. */
  palette() {
    const found = this.#array(Uint8Array, 4 * this.levels);
    return found.slice(0, 4 * Number(this.engine.lintx_palette(this.runner, found.byteOffset)));
  }

  /** The pixels of every image; with guidance, each image once. */
  allPixels() {
    return Array.from({ length: this.images }, (_, image) => this.pixels(image));
  }

  /** State number `number` of a layer as bytes, or null if there is no such state. */
  state(layer, number) {
    const count = this.#array(BigInt64Array, 1);
    const place = this.engine.lintx_state(this.runner, 0n, BigInt(layer), BigInt(number), count.byteOffset);
    return place ? new Uint8Array(this.engine.memory.buffer, place, Number(count[0])) : null;
  }

  /** The bytes of all states of one image. */
  stateBytes() {
    let bytes = 0;
    for (let layer = 0; layer < this.layers; layer++) {
      for (let number = 0, state; (state = this.state(layer, number)); number++) bytes += state.length;
    }
    return bytes;
  }

  #array(Type, count) {
    const bytes = count * Type.BYTES_PER_ELEMENT;
    if (bytes > LARGEST_SCRATCH) throw new Error("The images of this model are too large for this page.");
    this.scratch ??= this.engine.malloc(LARGEST_SCRATCH);
    return new Type(this.engine.memory.buffer, this.scratch, count);
  }

  #check(result) {
    if (result < 0n) throw new Error(this.#reason());
    return Number(result);
  }

  #reason() {
    const text = new Uint8Array(this.engine.memory.buffer, this.engine.lintx_error());
    return `The engine refuses: ${new TextDecoder().decode(text.slice(0, text.indexOf(0)))}.`;
  }
}
