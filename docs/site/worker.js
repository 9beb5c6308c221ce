/* Search when the pages are opened as files: browsers start no worker there, so its script runs in a hidden frame.
   The theme would load such a replacement from a server; this one is part of the site. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.ready = new Promise((resolve) => {
        const page = frame.contentDocument;
        this.scope.postMessage = (data) => this.receive(data);
        const script = page.createElement("script");
        script.src = url;
        script.onload = resolve;
        page.body.append(script);
      });
    }

    /* From the script to the page. */
    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    /* From the page to the script. */
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }
  };
}
