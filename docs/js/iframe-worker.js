// Browsers start no workers for pages that are files, so the search runs in a hidden frame there.
// The theme would fetch a script for this from the network, unless one of this name is given.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.onload = () => this.start(url);
      document.documentElement.append(this.frame);
    }

    start(url) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.send = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        this.waiting.forEach((data) => this.send(data));
      };
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.send ? this.send(data) : this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
